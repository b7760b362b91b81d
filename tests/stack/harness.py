# SPDX-License-Identifier: Apache-2.0
"""Real engines and real models for the stack tests: building, sampling, and replaying in Hugging Face."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ngrpo.rollout.records import take_finished
from perturbations import ReplayRecord, replaying
from perturbations.replay.sampling_mask import SamplingMask
from perturbations.replay.trajectory import FinishedTrajectory
from tests.support.token_log_probs import log_probs_of

QUESTIONS = [
    "What is 7 plus 5?",
    "Explain why the sky is blue.",
    "List three prime numbers and their sum.",
    "Write a short story about a fox.",
]

DISTURBED = {
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
}
"""Prefix caching on and prefills in chunks of at most 64 tokens: the hard case is the ordinary one in these tests."""

CROWDED = {
    "num_gpu_blocks_override": 8,
    "block_size": 32,
    "max_model_len": 192,
    "enable_prefix_caching": False,
}
"""A cache of eight blocks of 32 tokens: vLLM preempts requests, and computes them again from their records."""


def load_in_float32(folder: str) -> Any:
    """The trainer's side of an engine: the same model in Hugging Face's classes."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def build_engine(model: str, spec: dict[str, Any] | None, **options: Any) -> Any:
    """A float32 engine in this process, small and eager unless told otherwise."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM

    settings: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 1 << 28,
        "distributed_executor_backend": "uni",
        "disable_log_stats": True,
        **options,
    }
    if spec is not None:
        settings["additional_config"] = {"perturbation": spec}
    llm = LLM(model, **settings)
    # From vLLM 0.31 on, an engine that is freed destroys the process groups of all other engines in its process.
    finalizer = getattr(llm.llm_engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()
    return llm


@dataclass(frozen=True)
class Rollout:
    """One sampled trajectory.

    Attributes:
        prompt, tokens: token ids of the prompt and of the answer.
        record: the perturbed inputs.
        log_probs: log π of the answer's tokens as the perturbation's rollout noted it, (generated,) float32.
        engine_log_probs: log π of the same tokens as vLLM reports it; empty where it was not asked for.
        finished: the trajectory as the engine handed it over; None where a test builds the rollout itself.
    """

    prompt: list[int]
    tokens: list[int]
    record: ReplayRecord
    log_probs: np.ndarray
    engine_log_probs: list[float]
    finished: FinishedTrajectory | None = None

    @property
    def sequence(self) -> list[int]:
        return self.prompt + self.tokens


def engine_log_probs(completion: Any) -> list[float]:
    """vLLM's own log-probability of each token of an answer; it was sampled with ``logprobs=0``."""
    return [candidates[token].logprob for token, candidates in zip(completion.token_ids, completion.logprobs)]


def sample(
    llm: Any,
    prompts: Sequence[list[int]],
    arguments: Sequence[dict[str, Any]] | None = None,
    **params: Any,
) -> list[Rollout]:
    """Samples from token prompts. ``arguments``: extra_args["perturbation"] of each request."""
    from vllm import SamplingParams

    settings: dict[str, Any] = {
        "temperature": 1.0,
        "max_tokens": 64,
        "ignore_eos": True,
        "logprobs": 0,
        **params,
    }
    sampling_params = []
    for request_arguments in arguments or [None] * len(prompts):
        extra_args = {"perturbation": request_arguments} if request_arguments else None
        sampling_params.append(SamplingParams(**settings, extra_args=extra_args))
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, sampling_params, use_tqdm=False)
    trajectories = take_finished(llm)
    rollouts = []
    for prompt, output in zip(prompts, outputs):
        completion = output.outputs[0]
        trajectory = trajectories[output.request_id]
        rollout = Rollout(
            prompt=list(prompt),
            tokens=list(completion.token_ids),
            record=trajectory.record,
            log_probs=trajectory.log_probs,
            engine_log_probs=engine_log_probs(completion),
            finished=trajectory,
        )
        rollouts.append(rollout)
    return rollouts


def stock_answers(llm: Any, prompts: Sequence[list[int]], **params: Any) -> list[list[tuple[int, float]]]:
    """Tokens and vLLM's own log-probabilities of each answer, by draws that are the same in any engine."""
    from transformers import set_seed
    from vllm import SamplingParams

    set_seed(3)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, SamplingParams(logprobs=0, **params), use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    return [list(zip(completion.token_ids, engine_log_probs(completion))) for completion in completions]


def sample_with_masks(
    llm: Any, prompts: Sequence[list[int]], **params: Any
) -> tuple[list[Rollout], list[SamplingMask | None]]:
    """As :func:`sample`, with the tokens that top-k, top-p and min-p left, from an engine that records them."""
    rollouts = sample(llm, prompts, **params)
    return rollouts, [rollout.finished.sampling_mask for rollout in rollouts]


def sync(engine: Any, model: Any, folder: Path) -> None:
    """Sends the model's weights to the engine through a file, as the trainer does on a CPU after each step."""
    from safetensors.torch import save_file

    from ngrpo.trainers.common.weights_file import load_weights_file

    path = folder / "weights.safetensors"
    weights = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    save_file(weights, path)
    engine.llm_engine.collective_rpc(load_weights_file, args=(str(path),))
    engine.reset_prefix_cache()
    path.unlink()


def trainer_log_probs(
    model: Any,
    rollouts: Sequence[Rollout],
    masks: Sequence[SamplingMask | None],
    temperature: float = 1.0,
) -> torch.Tensor:
    """log π of all generated tokens as the trainer takes it, one after the other; corrected where there are masks."""
    from ngrpo.trainers.common.log_probs import corrected, with_overrides
    from ngrpo.trainers.common.sample_records import unpack

    generated_log_probs = []
    for rollout, mask in zip(rollouts, masks):
        tokens = torch.tensor([rollout.sequence])
        labels = tokens.roll(-1, dims=1)
        attention_mask = torch.ones_like(tokens)
        with torch.no_grad(), replaying(model, [rollout.record], attention_mask=attention_mask):
            logits = model(tokens).logits.float() / temperature
        correction: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if mask is not None:
            # The correction reads the mask alone, so that any log-probabilities will do.
            no_log_probs = np.zeros(len(rollout.sequence), np.float32)
            trajectory = FinishedTrajectory(rollout.record, no_log_probs, mask)
            correction = corrected(unpack([trajectory.pack()]), attention_mask)
        with correction:
            log_probs = with_overrides(log_probs_of)(logits, labels)
        generated_log_probs.append(log_probs[0, len(rollout.prompt) - 1 : -1])
    return torch.cat(generated_log_probs)


def chat_prompts(llm: Any, questions: Sequence[str] = tuple(QUESTIONS), copies: int = 1) -> list[list[int]]:
    """Chat-templated token prompts, each question ``copies`` times."""
    tokenizer = llm.get_tokenizer()
    prompts: list[list[int]] = []
    for question in questions:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        prompts.extend([prompt] * copies)
    return prompts


@torch.no_grad()
def replay_log_probs(
    model: Any,
    rollouts: Sequence[Rollout],
    temperature: float = 1.0,
    replay: bool = True,
    among: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """log π of each generated token in one right-padded Hugging Face forward, a (generated,) tensor per rollout.

    ``among``: the tokens that it is normalised over; None for all.
    """
    longest = max(len(rollout.sequence) for rollout in rollouts)
    tokens = torch.zeros(len(rollouts), longest, dtype=torch.int64, device=model.device)
    mask = torch.zeros_like(tokens)
    for row, rollout in enumerate(rollouts):
        end = len(rollout.sequence)
        tokens[row, :end] = tokens.new_tensor(rollout.sequence)
        mask[row, :end] = 1
    records = [rollout.record if replay else None for rollout in rollouts]
    with replaying(model, records, attention_mask=mask):
        logits = model(tokens, attention_mask=mask).logits
    generated_log_probs = []
    for row, rollout in enumerate(rollouts):
        start = len(rollout.prompt)
        end = len(rollout.sequence)
        scaled = logits[row, start - 1 : end - 1].float() / temperature
        if among is not None:
            allowed = tokens.new_tensor(among)
            excluded = torch.full_like(scaled, -torch.inf)
            scaled = excluded.index_copy(1, allowed, scaled[:, allowed])
        # log_softmax on a CPU is 6e-6 too high for rows as long as these; the trainer does not use it either.
        log_probs = log_probs_of(scaled, tokens[row, start:end])
        generated_log_probs.append(log_probs.cpu())
    return generated_log_probs


def gaps(model: Any, rollouts: Sequence[Rollout], replay: bool = True, temperature: float = 1.0) -> torch.Tensor:
    """|Δ log p| between rollout and replay at every generated token."""
    replayed = replay_log_probs(model, rollouts, temperature, replay)
    rolled_out = [torch.from_numpy(rollout.log_probs) for rollout in rollouts]
    return (torch.cat(replayed) - torch.cat(rolled_out)).abs()


def assert_exact(llm: Any, model: Any, rate: float) -> tuple[list[Rollout], int]:
    """Sixteen answers of 80 tokens under the engine's perturbation are replayed, and leaving the replay out shows.

    Returns:
        The answers, and how many tokens they have.
    """
    rollouts = sample(llm, chat_prompts(llm, copies=4), max_tokens=80)
    gap = gaps(model, rollouts)
    # OpenRLHF's importance sampling compares vLLM's own log-probabilities with the trainer's of the same tokens.
    for rollout in rollouts:
        np.testing.assert_allclose(rollout.engine_log_probs, rollout.log_probs, atol=1e-4)
    tokens = len(gap)
    assert tokens >= 1000
    assert gap.max() <= 1e-4
    assert gap.mean() <= 1e-5
    perturbed = sum(len(rollout.record) for rollout in rollouts)
    expected = rate * tokens
    assert abs(perturbed - expected) <= 0.25 * expected
    without_replay = gaps(model, rollouts[::4], replay=False)
    assert without_replay.max() >= 1e-2, "leaving the replay out must show, or this test shows nothing"
    return rollouts, tokens


def feeds_its_text(rollouts: Sequence[Rollout]) -> bool:
    """Whether each recorded input is the token of the text at its position, as `cuts` feeds: no replay is needed."""
    for rollout in rollouts:
        record = rollout.record
        if (record.weights != 1.0).any():
            return False
        for position, ids in zip(record.positions.tolist(), record.ids.tolist()):
            if position >= len(rollout.sequence) or ids != [rollout.sequence[position]]:
                return False
    return True


def by_token(record: ReplayRecord) -> np.ndarray:
    """The weights of each position, in the order of their candidates' ids."""
    order = np.argsort(record.ids, axis=-1)
    return np.take_along_axis(record.weights, order, axis=-1)


def assert_same(first: Sequence[Rollout], second: Sequence[Rollout]) -> None:
    """Gates and noise are equal bit for bit, tokens and weights up to float rounding.

    A token may flip where a draw falls within rounding of a boundary; what follows it is another trajectory. So the
    records are compared up to the first difference, and almost no trajectory may have one.
    """
    flips = 0
    for left, right in zip(first, second):
        assert left.record.seed == right.record.seed
        equal_tokens = np.array(left.sequence) == np.array(right.sequence)
        common_length = len(equal_tokens)
        if not equal_tokens.all():
            common_length = int(equal_tokens.argmin())
            flips += 1
        left_record = left.record.truncate(common_length)
        right_record = right.record.truncate(common_length)
        np.testing.assert_array_equal(left_record.positions, right_record.positions)
        # Two candidates with near-equal logits may swap places, so compare them in the order of their ids.
        np.testing.assert_array_equal(np.sort(left_record.ids), np.sort(right_record.ids))
        np.testing.assert_allclose(by_token(left_record), by_token(right_record), atol=2e-4)
        if left_record.sigma is not None:
            np.testing.assert_array_equal(left_record.sigma, right_record.sigma)
    assert flips <= len(first) // 8


# --- vLLM's scheduler and worker, of engines in this process --------------------------------------------------------


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def worker_of(llm: Any) -> Any:
    """The worker of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def note_preemptions(llm: Any) -> list[str]:
    """A list that gets a request's id each time that the scheduler preempts it from now on."""
    preempted: list[str] = []
    scheduler = scheduler_of(llm)
    original = scheduler._preempt_request

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    return preempted


@contextlib.contextmanager
def one_token_prefills(llm: Any) -> Iterator[list[int]]:
    """Prompts are computed one token a step; yields how many tokens of each request were scheduled in each step."""
    scheduled_tokens: list[int] = []
    scheduler = scheduler_of(llm)
    config = scheduler.scheduler_config
    original_schedule = scheduler.schedule
    original_threshold = config.long_prefill_token_threshold

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = original_schedule(*args, **kwargs)
        scheduled_tokens.extend(output.num_scheduled_tokens.values())
        return output

    config.long_prefill_token_threshold = 1
    scheduler.schedule = schedule
    try:
        yield scheduled_tokens
    finally:
        config.long_prefill_token_threshold = original_threshold
        scheduler.schedule = original_schedule
