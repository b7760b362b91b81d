# SPDX-License-Identifier: Apache-2.0
"""What an engine refuses, and what happens to records when requests are aborted or weights change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ngrpo.rollout import set_perturbation, startup_check, take_records
from perturbations import ExactIndex
from tests.stack.harness import build_engine, chat_prompts, sample
from tests.stack.scheduling import worker_of

pytestmark = pytest.mark.stack


def test_an_engine_without_a_perturbation_has_no_records(model: str) -> None:
    with pytest.raises(RuntimeError, match="worker 0 runs unperturbed"):
        take_records(build_engine(model, None))


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

    proofs: list[object] = []
    original = startup_check._prove
    monkeypatch.setattr(startup_check, "_prove", lambda core: (original(core), proofs.append(core)))
    prompts = [{"prompt_token_ids": prompt} for prompt in chat_prompts(engine)[:2]]

    def generate() -> None:
        engine.generate(prompts, SamplingParams(max_tokens=3), use_tqdm=False)

    set_perturbation(engine, "gumbel")
    generate()
    engine.llm_engine.collective_rpc("perturbation_probe")
    assert len(proofs) == 1
    generate()
    set_perturbation(engine, "soft")
    core = engine.llm_engine.engine_core.engine_core
    core.pause_scheduler("keep")
    engine.llm_engine.collective_rpc("perturbation_probe")
    assert len(proofs) == 2 and core.is_scheduler_paused()
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


def test_new_weights_give_new_neighbors(model: str, hf_model: Any) -> None:
    llm = build_engine(model, {"name": "neighbor", "rate": 1.0, "mix_temperature": 3.0, "realization": "sampled"})
    worker = worker_of(llm)
    runner = worker.model_runner
    prompts = chat_prompts(llm)[:2]
    sample(llm, prompts, max_tokens=8)
    changed = {name: p.detach().clone() for name, p in hf_model.named_parameters()}
    draws = torch.Generator().manual_seed(0)
    embedding = changed["model.embed_tokens.weight"]
    embedding += 0.5 * embedding.std() * torch.randn(embedding.shape, generator=draws)
    runner.reload_weights(weights_iterator=iter(changed.items()))
    (rollout, _) = sample(llm, prompts, max_tokens=8)
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
        (rollout, _) = sample(llm, prompts, max_tokens=8)
        ids, _ = ExactIndex(embedding).query(torch.from_numpy(rollout.record.ids[:, 0]).long(), 2)
        assert ids.tolist() == rollout.record.ids[:, 1:].tolist()
