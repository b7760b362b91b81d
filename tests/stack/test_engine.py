# SPDX-License-Identifier: Apache-2.0
"""An engine with a perturbation: records of aborted requests, new weights; it waits for no device and no compiler."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.decoding import counting
from ngrpo.rollout import neighbor_drift, set_perturbation, startup_check, take_records
from perturbations import ExactIndex
from tests.stack.harness import Rollout, assert_exact, chat_prompts, gaps, sample, sync, worker_of

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("neighbor", {"variant": "released"}),
    ("neighbor", {"metric": "l2", "mix_temperature": 3.0}),
    ("gaussian", {"base": "soft"}),
    ("multiplex", {"draws": "distinct"}),
]


@pytest.mark.filterwarnings("ignore:neighbor with rate 1")
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_options_are_replayed(engine: Any, hf_model: Any, name: str, options: dict[str, Any]) -> None:
    """At rate 1 every position has the inputs of the perturbation; each with its defaults is in test_v2.py."""
    set_perturbation(engine, name, rate=1.0, **options)
    assert_exact(engine, hf_model, 1.0)


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


class Transfer:
    """vLLM's transfer of weights without its network: the worker and the loader are its own."""

    def __init__(self, update_weights: Callable[[Any], object]) -> None:
        self.update_weights = update_weights

    def start_weight_update(self) -> None: ...

    finish_weight_update = reset_weight_update_target = start_weight_update


def assert_nearest(rollouts: list[Rollout], embedding: Tensor) -> None:
    """Each recorded set is the anchor and its two nearest in this matrix."""
    ids = torch.cat([torch.from_numpy(r.record.ids.astype("int64")) for r in rollouts])
    assert len(ids) > 10 and torch.equal(ids[:, 1:], ExactIndex(embedding).query(ids[:, 0], 2)[0])


def moved(embedding: Tensor, seed: int) -> Tensor:
    """Noise of half the embeddings' size moves most sets."""
    noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(seed))
    return embedding + 0.5 * embedding.square().mean().sqrt() * noise


@pytest.fixture
def parameter(engine: Any, hf_model: Any, tmp_path: Path) -> Iterator[Tensor]:
    """The trainer's embedding; afterwards both sides have the matrix of before."""
    weight = hf_model.get_input_embeddings().weight.data
    kept = weight.clone()
    yield weight
    weight.copy_(kept)
    sync(engine, hf_model, tmp_path)


def test_a_weight_sync_changes_the_sets_as_the_policy_says(
    engine: Any, hf_model: Any, parameter: Tensor, tmp_path: Path
) -> None:
    """By the file of the CPU profile. Replay stays exact under every policy."""
    before, prompts = parameter.clone(), chat_prompts(engine, copies=2)

    def rollouts(**options: Any) -> list[Rollout]:
        set_perturbation(engine, "neighbor", rate=0.5, mix_temperature=3.0, **options)
        done = sample(engine, prompts, max_tokens=12)
        assert gaps(hf_model, done).max() <= 1e-4
        return done

    for refresh in ("never", "every_sync"):
        assert_nearest(rollouts(refresh=refresh), before)
    parameter.copy_(moved(before, 2))
    sync(engine, hf_model, tmp_path)
    drift = neighbor_drift(engine)
    assert drift.tokens == drift.compared > 20
    assert drift.changed == drift.changed_since_start > drift.tokens // 4
    assert_nearest(rollouts(refresh="every_sync"), parameter)
    assert_nearest(rollouts(refresh="never"), before)
    rollouts(skip_same_word=True)


def test_a_sparse_weight_transfer_gives_new_neighbors(engine: Any, parameter: Tensor) -> None:
    """Single elements, in place, through the model's loader: vLLM's own way that runs without CUDA."""
    patches = pytest.importorskip("vllm.model_executor.model_loader.checkpoint_weight_patch")
    set_perturbation(engine, "neighbor", rate=1.0, mix_temperature=3.0, realization="sampled")
    worker, prompts = worker_of(engine), chat_prompts(engine)[:2]
    sample(engine, prompts, max_tokens=8)

    def elements(update: Tensor) -> None:
        at = torch.arange(0, update.numel(), 3)
        patch = ("model.embed_tokens.weight", tuple(update.shape), update.dtype, update.flatten()[at], at)
        model = worker.model_runner.get_model()
        patches.load_checkpoint_weight_patches(model, [patches.CheckpointWeightPatch(*patch)])

    parameter.view(-1)[::3] = moved(parameter, 0).view(-1)[::3]
    worker.weight_transfer_engine = Transfer(elements)
    worker.start_weight_update()
    worker.update_weights(parameter)
    worker.finish_weight_update()
    engine.reset_prefix_cache()
    assert_nearest(sample(engine, prompts, max_tokens=8), parameter)


def test_until_is_found_across_token_borders(engine: Any) -> None:
    """`until` ends the perturbation at its text, in whatever tokens it comes; a prompt that has it gets none."""
    from vllm.sampling_params import StructuredOutputsParams

    set_perturbation(engine, "gumbel", rate=1.0)
    tokenizer, end = engine.get_tokenizer(), "</think>"
    question = tokenizer.encode("What is 7 plus 5?")
    texts = ["two </think> one more", "x = (1)></think>one more", "so be it</think>\\boxed{4}"]
    texts += ["</thin </think </think> end"]
    for text in texts:
        grammar = StructuredOutputsParams(choice=[text])
        (rollout,) = sample(engine, [question], ignore_eos=False, structured_outputs=grammar)
        tokens = [token for token in rollout.tokens if token != tokenizer.eos_token_id]
        assert tokenizer.decode(tokens) == text
        lengths = [len(tokenizer.decode(tokens[: i + 1])) for i in range(len(tokens))]
        last = next(i for i, length in enumerate(lengths) if length >= text.index(end) + len(end))
        assert (rollout.record.positions - len(question)).tolist() == list(range(last)), text
    closed = tokenizer.encode("What is 7 plus 5?<think>\n\n</think>\n\n")
    assert len(sample(engine, [closed], max_tokens=4)[0].record) == 0


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


def test_a_start_on_a_cpu_looks_for_no_neighbors(engine: Any) -> None:
    """Its index could take minutes to build, and a neighbor of the start would count in the first drift."""
    set_perturbation(engine, "neighbor", k=2)
    attached = worker_of(engine).perturbation
    attached.embeddings.refresh()
    attached.drift()  # of other tests' queries
    attached.warm_up()
    attached.embeddings.refresh()
    assert attached.drift() is None


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
