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
    llm_engine = engine.llm_engine
    for name, prompt in zip(("kept", "aborted"), prompts):
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
    for _ in range(4):
        llm_engine.step()
    with pytest.raises(Exception, match="requests are running"):
        set_perturbation(engine, "soft")
    llm_engine.abort_request(["aborted"])
    while llm_engine.has_unfinished_requests():
        llm_engine.step()
    assert list(take_records(engine)) == ["kept"]


def test_an_engine_in_its_callers_process_is_idle_after_its_requests(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes the records, and no further step tells the worker that the requests have finished."""
    from vllm import SamplingParams

    checked_cores: list[object] = []
    original = startup_check.check_core

    def check_core(core: object) -> None:
        original(core)
        checked_cores.append(core)

    monkeypatch.setattr(startup_check, "check_core", check_core)
    inputs = [{"prompt_token_ids": prompt} for prompt in chat_prompts(engine)[:2]]

    def generate() -> None:
        engine.generate(inputs, SamplingParams(max_tokens=3), use_tqdm=False)

    set_perturbation(engine, "gumbel")
    generate()
    engine.llm_engine.collective_rpc("perturbation_check")
    assert len(checked_cores) == 1

    generate()
    set_perturbation(engine, "soft")
    core = engine.llm_engine.engine_core.engine_core
    core.pause_scheduler("keep")
    engine.llm_engine.collective_rpc("perturbation_check")
    assert len(checked_cores) == 2
    assert core.is_scheduler_paused()

    core.resume_scheduler()
    generate()
    assert len(take_records(engine)) == 2


class Transfer:
    """Stands for vLLM's transfer of weights, without a network; the worker and the loader are vLLM's own."""

    def __init__(self, update_weights: Callable[[Any], object]) -> None:
        self.update_weights = update_weights

    def start_weight_update(self) -> None: ...

    finish_weight_update = reset_weight_update_target = start_weight_update


def assert_nearest(rollouts: list[Rollout], embedding: Tensor) -> None:
    """Each recorded set is the anchor and its two nearest in this matrix."""
    ids_of_rollouts = [torch.from_numpy(rollout.record.ids).long() for rollout in rollouts]
    ids = torch.cat(ids_of_rollouts)
    anchors = ids[:, 0]
    assert len(anchors) > 10
    nearest, _ = ExactIndex(embedding).query(anchors, 2)
    assert torch.equal(ids[:, 1:], nearest)


def moved(embedding: Tensor, seed: int) -> Tensor:
    """The matrix with noise of half its size, which changes most sets of neighbors."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(embedding.shape, generator=generator)
    size = embedding.square().mean().sqrt()
    return embedding + 0.5 * size * noise


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
    """The weights come by the file of the CPU profile. Replay stays exact under every policy."""
    before = parameter.clone()
    prompts = chat_prompts(engine, copies=2)

    def exact_rollouts(**options: Any) -> list[Rollout]:
        set_perturbation(engine, "neighbor", rate=0.5, mix_temperature=3.0, **options)
        rollouts = sample(engine, prompts, max_tokens=12)
        assert gaps(hf_model, rollouts).max() <= 1e-4
        return rollouts

    for refresh in ("never", "every_sync"):
        assert_nearest(exact_rollouts(refresh=refresh), before)

    parameter.copy_(moved(before, 2))
    sync(engine, hf_model, tmp_path)
    drift = neighbor_drift(engine)
    assert drift.tokens == drift.compared > 20
    assert drift.changed == drift.changed_since_start > drift.tokens // 4
    assert_nearest(exact_rollouts(refresh="every_sync"), parameter)
    assert_nearest(exact_rollouts(refresh="never"), before)
    exact_rollouts(skip_same_word=True)


def test_a_sparse_weight_transfer_gives_new_neighbors(engine: Any, parameter: Tensor) -> None:
    """Single elements, in place, through the model's loader: vLLM's own way that runs without CUDA."""
    patches = pytest.importorskip("vllm.model_executor.model_loader.checkpoint_weight_patch")
    set_perturbation(engine, "neighbor", rate=1.0, mix_temperature=3.0, realization="sampled")
    worker = worker_of(engine)
    prompts = chat_prompts(engine)[:2]
    sample(engine, prompts, max_tokens=8)
    every_third = torch.arange(0, parameter.numel(), 3)

    def load_every_third(update: Tensor) -> None:
        values = update.flatten()[every_third]
        patch = patches.CheckpointWeightPatch(
            "model.embed_tokens.weight", tuple(update.shape), update.dtype, values, every_third
        )
        patches.load_checkpoint_weight_patches(worker.model_runner.get_model(), [patch])

    parameter.view(-1)[every_third] = moved(parameter, 0).view(-1)[every_third]
    worker.weight_transfer_engine = Transfer(load_every_third)
    worker.start_weight_update()
    worker.update_weights(parameter)
    worker.finish_weight_update()
    engine.reset_prefix_cache()
    assert_nearest(sample(engine, prompts, max_tokens=8), parameter)


def test_until_is_found_across_token_borders(engine: Any) -> None:
    """`until` ends the perturbation at its text, in whatever tokens it comes; a prompt that has it gets none."""
    from vllm.sampling_params import StructuredOutputsParams

    set_perturbation(engine, "gumbel", rate=1.0)
    end = "</think>"
    tokenizer = engine.get_tokenizer()
    question = tokenizer.encode("What is 7 plus 5?")
    texts = [
        "two </think> one more",
        "x = (1)></think>one more",
        "so be it</think>\\boxed{4}",
        "</thin </think </think> end",
    ]
    for text in texts:
        grammar = StructuredOutputsParams(choice=[text])
        (rollout,) = sample(engine, [question], ignore_eos=False, structured_outputs=grammar)
        tokens = [token for token in rollout.tokens if token != tokenizer.eos_token_id]
        assert tokenizer.decode(tokens) == text
        # The token with the last character of `end` is the first that is not perturbed.
        first_plain = 0
        while end not in tokenizer.decode(tokens[: first_plain + 1]):
            first_plain += 1
        perturbed = rollout.record.positions - len(question)
        assert perturbed.tolist() == list(range(first_plain)), text

    closed = tokenizer.encode("What is 7 plus 5?<think>\n\n</think>\n\n")
    (rollout,) = sample(engine, [closed], max_tokens=4)
    assert len(rollout.record) == 0


# --- nothing is waited for ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "params"),
    [
        (1.0, {}),
        (0.3, {"top_p": 0.9}),
    ],
)
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
    every_input = [{"prompt_token_ids": prompt} for prompt in chat_prompts(engine)]
    sampling: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9, "top_k": 20},
        {"min_p": 0.1},
        {"temperature": 0.0},
    ]
    torch._dynamo.reset()
    try:
        worker_of(engine).compile_or_warm_up_model()  # what vLLM calls at the start
        with torch.compiler.set_stance("fail_on_recompile"):
            for inputs in (every_input, every_input[:1]):
                for params in sampling:
                    engine.generate(inputs, SamplingParams(max_tokens=3, **params), use_tqdm=False)
                    assert len(take_records(engine)) == len(inputs)
    finally:
        torch._dynamo.reset()


def test_a_start_on_a_cpu_looks_for_no_neighbors(engine: Any) -> None:
    """Its index could take minutes to build, and a neighbor of the start would count in the first drift."""
    set_perturbation(engine, "neighbor", k=2)
    attached = worker_of(engine).perturbation
    attached.embeddings.refresh()
    attached.drift()  # takes what other tests' queries have counted
    attached.warm_up()
    attached.embeddings.refresh()
    assert attached.drift() is None


def test_a_dummy_run_does_the_work_of_a_step_and_leaves_nothing(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Because of its work, vLLM's profiling run measures the memory that a step needs."""
    set_perturbation(engine, "gumbel")
    prompts = chat_prompts(engine)[:2]
    arguments = [{"seed": 3, "sample": 0}, {"seed": 3, "sample": 1}]
    # Put the prompts' blocks into the prefix cache, so that both runs are laid out alike.
    sample(engine, prompts, max_tokens=1)
    before = sample(engine, prompts, arguments, max_tokens=6)

    batch_sizes: list[int] = []
    worker = worker_of(engine)
    perturbation_class = type(worker.perturbation.perturber._perturbation)
    original_propose = perturbation_class.propose

    def propose(self: Any, step: Any) -> Any:
        batch_sizes.append(len(step.logits))
        return original_propose(self, step)

    monkeypatch.setattr(perturbation_class, "propose", propose)
    runner = worker.model_runner
    hidden_states = torch.zeros(5, runner.model_config.get_hidden_size())
    with torch.inference_mode():
        runner._dummy_sampler_run(hidden_states)
    assert set(batch_sizes) == {5}

    after = sample(engine, prompts, arguments, max_tokens=6)
    for rollout_before, rollout_after in zip(before, after):
        assert rollout_after.tokens == rollout_before.tokens
        assert rollout_after.record == rollout_before.record
        assert np.array_equal(rollout_after.log_probs, rollout_before.log_probs)


def test_the_seed_is_no_part_of_the_key_of_compiled_graphs(smollm2: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    def key(**spec: Any) -> str:
        config = EngineArgs(smollm2, additional_config={"perturbation": spec}).create_engine_config()
        config_hash = config.compute_hash()
        assert config.additional_config == {"perturbation": spec}, "the seed stays in the configuration"
        return config_hash

    gumbel = key(name="gumbel")
    assert key(name="gumbel", seed=1) == gumbel
    assert key(name="gumbel", seed=2) == gumbel

    plain = EngineArgs(smollm2).create_engine_config().compute_hash()
    other_options = key(name="gumbel", k=7)
    soft = key(name="soft")
    assert len({plain, gumbel, other_options, soft}) == 4
