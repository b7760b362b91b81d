# SPDX-License-Identifier: Apache-2.0
"""An engine with a perturbation: records of aborted requests, new weights; it waits for no device and no compiler."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.decode_step import counting
from ngrpo.rollout import set_perturbation, startup_check, take_records
from perturbations import ExactIndex, ReplayRecord
from tests.stack.harness import chat_prompts, sample
from tests.stack.scheduling import worker_of

pytestmark = pytest.mark.stack


def test_aborted_requests_leave_no_record(engine: Any) -> None:
    from vllm import SamplingParams

    set_perturbation(engine, "gumbel")
    prompts = chat_prompts(engine)[:2]
    for name, prompt in zip(("kept", "aborted"), prompts):
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        engine.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
    for _ in range(4):
        engine.llm_engine.step()
    with pytest.raises(Exception, match="requests are running"):
        set_perturbation(engine, "soft")
    engine.llm_engine.abort_request(["aborted"])
    while engine.llm_engine.has_unfinished_requests():
        engine.llm_engine.step()
    assert list(take_records(engine)) == ["kept"]


def test_an_engine_in_its_callers_process_is_idle_after_its_requests(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes the records, and no further step tells the worker that the requests have finished."""
    from vllm import SamplingParams

    checks: list[object] = []
    original = startup_check.check_core
    monkeypatch.setattr(startup_check, "check_core", lambda core: (original(core), checks.append(core)))
    prompts = [{"prompt_token_ids": prompt} for prompt in chat_prompts(engine)[:2]]

    def generate() -> None:
        engine.generate(prompts, SamplingParams(max_tokens=3), use_tqdm=False)

    set_perturbation(engine, "gumbel")
    generate()
    engine.llm_engine.collective_rpc("perturbation_check")
    assert len(checks) == 1
    generate()
    set_perturbation(engine, "soft")
    core = engine.llm_engine.engine_core.engine_core
    core.pause_scheduler("keep")
    engine.llm_engine.collective_rpc("perturbation_check")
    assert len(checks) == 2 and core.is_scheduler_paused()
    core.resume_scheduler()
    generate()
    assert len(take_records(engine)) == 2


def test_a_stop_string_keeps_the_record(engine: Any) -> None:
    """vLLM aborts such a request inside the engine once the front end has seen the string."""
    from vllm import SamplingParams

    set_perturbation(engine, "gumbel")
    prompts = [{"prompt_token_ids": p} for p in chat_prompts(engine)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=48, stop=[" the", ".", " and"]), use_tqdm=False)
    assert any(o.outputs[0].finish_reason == "stop" for o in outputs)
    assert set(take_records(engine)) == {o.request_id for o in outputs}


class Transfer:
    """vLLM's transfer of weights without its network: the worker and the loader are its own."""

    def __init__(self, update_weights: Callable[[Any], object]) -> None:
        self.update_weights = update_weights

    def start_weight_update(self) -> None: ...

    finish_weight_update = reset_weight_update_target = start_weight_update


def test_new_weights_give_new_neighbors(engine: Any, hf_model: Any, request: pytest.FixtureRequest) -> None:
    set_perturbation(engine, "neighbor", rate=1.0, mix_temperature=3.0, realization="sampled")
    worker = worker_of(engine)
    runner = worker.model_runner
    request.addfinalizer(
        lambda: runner.reload_weights(weights_iterator=iter(dict(hf_model.named_parameters()).items()))
    )
    prompts = chat_prompts(engine)[:2]
    sample(engine, prompts, max_tokens=8)
    changed = {name: p.detach().clone() for name, p in hf_model.named_parameters()}
    draws = torch.Generator().manual_seed(0)
    embedding = changed["model.embed_tokens.weight"]
    embedding += 0.5 * embedding.std() * torch.randn(embedding.shape, generator=draws)
    runner.reload_weights(weights_iterator=iter(changed.items()))
    engine.reset_prefix_cache()
    (rollout, _) = sample(engine, prompts, max_tokens=8)
    ids, _ = ExactIndex(embedding).query(torch.from_numpy(rollout.record.ids[:, 0]).long(), 2)
    assert ids.tolist() == rollout.record.ids[:, 1:].tolist()

    # The other ways write parameters in place: whole shards, or single elements through the model's loader.
    def shards(update: Tensor) -> None:
        runner.get_model().model.embed_tokens.weight.data[: len(update)] = update

    def elements(update: Tensor) -> None:
        patches = pytest.importorskip("vllm.model_executor.model_loader.checkpoint_weight_patch")
        at = torch.arange(0, update.numel(), 3)
        patch = ("model.embed_tokens.weight", tuple(update.shape), update.dtype, update.flatten()[at], at)
        patches.load_checkpoint_weight_patches(runner.get_model(), [patches.CheckpointWeightPatch(*patch)])

    for write, changed_part in ((shards, slice(None)), (elements, slice(None, None, 3))):
        new = embedding + 0.5 * embedding.std() * torch.randn(embedding.shape, generator=draws)
        embedding.view(-1)[changed_part] = new.view(-1)[changed_part]
        worker.weight_transfer_engine = Transfer(write)
        worker.start_weight_update()
        worker.update_weights(embedding)
        worker.finish_weight_update()
        engine.reset_prefix_cache()
        (rollout, _) = sample(engine, prompts, max_tokens=8)
        ids, _ = ExactIndex(embedding).query(torch.from_numpy(rollout.record.ids[:, 0]).long(), 2)
        assert ids.tolist() == rollout.record.ids[:, 1:].tolist()


# --- nothing is waited for ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "params"), [(1.0, {}), (0.3, {"top_p": 0.9})])
def test_decode_steps_wait_for_nothing(engine: Any, rate: float, params: dict[str, Any]) -> None:
    set_perturbation(engine, "gumbel", rate=rate)
    with counting(worker_of(engine).perturbation.perturber) as counts:
        sample(engine, chat_prompts(engine)[:3], max_tokens=10, **params)
    assert counts.steps >= 8
    assert counts.waits == ()
    assert counts.uploads <= 2 * counts.steps + 6  # and two each time that the batch is laid out anew
    assert counts.launches < 120 * counts.steps


def test_nothing_is_compiled_after_the_start(engine: Any) -> None:
    """Many requests and one, with and without filters, sampled and greedy; vLLM's own log-probabilities left out."""
    from vllm import SamplingParams

    set_perturbation(engine, "gumbel")
    prompts = [{"prompt_token_ids": prompt} for prompt in chat_prompts(engine)]
    torch._dynamo.reset()
    try:
        worker_of(engine).compile_or_warm_up_model()  # what vLLM calls at the start
        with torch.compiler.set_stance("fail_on_recompile"):
            for some in (prompts, prompts[:1]):
                for params in ({}, {"top_p": 0.9, "top_k": 20}, {"min_p": 0.1}, {"temperature": 0.0}):
                    engine.generate(some, SamplingParams(max_tokens=3, **params), use_tqdm=False)
                    assert len(take_records(engine)) == len(some)
    finally:
        torch._dynamo.reset()


def test_a_dummy_run_does_the_work_of_a_step_and_leaves_nothing(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So vLLM measures its memory with what a step needs."""
    set_perturbation(engine, "gumbel")
    worker, prompts = worker_of(engine), chat_prompts(engine)[:2]
    arguments = [{"seed": 3, "sample": i} for i in range(2)]
    sample(engine, prompts, max_tokens=1)  # their blocks are in the prefix cache, so that both runs are laid out alike
    before = sample(engine, prompts, arguments, max_tokens=6)
    perturber, rows = worker.perturbation.perturber, []
    proposed = type(perturber._perturbation).propose

    def propose(self: Any, step: Any) -> Any:
        rows.append(len(step.logits))
        return proposed(self, step)

    monkeypatch.setattr(type(perturber._perturbation), "propose", propose)
    runner = worker.model_runner
    with torch.inference_mode():
        runner._dummy_sampler_run(torch.zeros(5, runner.model_config.get_hidden_size()))
    assert set(rows) == {5}
    for one, other in zip(before, sample(engine, prompts, arguments, max_tokens=6)):
        assert one.tokens == other.tokens and one.record == other.record
        assert np.array_equal(one.log_probs, other.log_probs)


def test_the_seed_is_no_part_of_the_key_of_compiled_graphs(smollm2: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    def key(**spec: Any) -> str:
        config = EngineArgs(smollm2, additional_config={"perturbation": spec}).create_engine_config()
        found = config.compute_hash()
        assert config.additional_config == {"perturbation": spec}
        return found

    plain = EngineArgs(smollm2).create_engine_config().compute_hash()
    assert key(name="gumbel", seed=1) == key(name="gumbel", seed=2) == key(name="gumbel")
    assert len({plain, key(name="gumbel"), key(name="gumbel", k=7), key(name="soft")}) == 4


def test_a_record_is_read_once_for_a_request_and_not_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys as original
    from vllm.v1.request import Request

    from ngrpo.rollout.request_arguments import with_trajectory_keys

    plain = inspect.unwrap(original)
    keys_of, reads, read = with_trajectory_keys(plain), [], ReplayRecord.from_bytes
    monkeypatch.setattr(ReplayRecord, "from_bytes", lambda data: reads.append(1) or read(data))
    ids = np.zeros((2, 1), np.int32)
    record = ReplayRecord(5, 60, 100, np.array([70, 90], np.int32), ids, ids.astype(np.float32), None, np.ones(2, bool))
    params = SamplingParams(max_tokens=4, extra_args={"perturbation": {"record": record.to_bytes()}})
    request = Request("a", list(range(128)), params, None)
    keyed = [keys_of(request, start, start + 16, 0)[0] is not None for start in range(0, 144, 16)]
    assert keyed == [False] * 4 + [True] * 5  # from the block that holds position 70
    assert len(reads) == 1
