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

DISTURBED = {"max_num_batched_tokens": 64, "enable_prefix_caching": True, "enable_chunked_prefill": True}
"""Prefix caching on and prefills in chunks of at most 64 tokens: the hard case is the ordinary one in these tests."""


CROWDED = {"num_gpu_blocks_override": 8, "block_size": 32, "max_model_len": 192, "enable_prefix_caching": False}
"""A cache of eight blocks of 32 tokens: trajectories are thrown out and computed again from their records."""


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

    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 16}
    settings |= {"kv_cache_memory_bytes": 1 << 28, "distributed_executor_backend": "uni", "disable_log_stats": True}
    extra = {"additional_config": {"perturbation": spec}} if spec is not None else {}
    llm = LLM(model, **{**settings, **options, **extra})
    # From vLLM 0.31 on, an engine that is freed takes the process groups of all others in its process along.
    finalizer = getattr(llm.llm_engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()
    return llm


@dataclass(frozen=True)
class Rollout:
    """One sampled trajectory."""

    prompt: list[int]
    tokens: list[int]
    record: ReplayRecord
    log_probs: np.ndarray
    engine_log_probs: list[float]
    finished: FinishedTrajectory | None = None

    @property
    def sequence(self) -> list[int]:
        return self.prompt + self.tokens


def sample(
    llm: Any, prompts: Sequence[list[int]], arguments: Sequence[dict[str, Any]] | None = None, **params: Any
) -> list[Rollout]:
    """Samples from token prompts. ``arguments``: extra_args["perturbation"] of each request."""
    from vllm import SamplingParams

    settings: dict[str, Any] = {"temperature": 1.0, "max_tokens": 64, "ignore_eos": True, "logprobs": 0, **params}
    each = [
        SamplingParams(**settings, extra_args={"perturbation": given} if given else None)
        for given in (arguments or [None] * len(prompts))
    ]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], each, use_tqdm=False)
    taken = take_finished(llm)
    rollouts = []
    for prompt, output in zip(prompts, outputs):
        completion, finished = output.outputs[0], taken[output.request_id]
        tokens = list(completion.token_ids)
        engine = [step[token].logprob for step, token in zip(completion.logprobs, tokens)]
        rollouts.append(Rollout(list(prompt), tokens, finished.record, finished.log_probs, engine, finished))
    return rollouts


def stock_answers(llm: Any, prompts: Sequence[list[int]], **params: Any) -> list[list[tuple[int, float]]]:
    """Tokens and vLLM's own log-probabilities of each answer, by draws that are the same in any engine."""
    from transformers import set_seed
    from vllm import SamplingParams

    set_seed(3)
    inputs = [{"prompt_token_ids": p} for p in prompts]
    outputs = llm.generate(inputs, SamplingParams(logprobs=0, **params), use_tqdm=False)
    answers = (output.outputs[0] for output in outputs)
    return [[(token, step[token].logprob) for token, step in zip(a.token_ids, a.logprobs)] for a in answers]


def sample_with_masks(
    llm: Any, prompts: Sequence[list[int]], **params: Any
) -> tuple[list[Rollout], list[SamplingMask | None]]:
    """As :func:`sample`, with the tokens that sampling left, from an engine that records them."""
    rollouts = sample(llm, prompts, **params)
    return rollouts, [rollout.finished.sampling_mask for rollout in rollouts]


def sync(engine: Any, model: Any, folder: Path) -> None:
    """What the trainer does after each step on a CPU: its weights reach the engine through a file."""
    from safetensors.torch import save_file

    from ngrpo.trainers.common.weights_file import load_weights_file

    path = folder / "weights.safetensors"
    save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, path)
    engine.llm_engine.collective_rpc(load_weights_file, args=(str(path),))
    engine.reset_prefix_cache()
    path.unlink()


def trainer_log_probs(
    model: Any, rollouts: Sequence[Rollout], masks: Sequence[SamplingMask | None], temperature: float = 1.0
) -> torch.Tensor:
    """log π of all generated tokens as the trainer takes it, one after the other; corrected where there are masks."""
    from ngrpo.trainers.common.log_probs import corrected, with_overrides
    from ngrpo.trainers.common.sample_records import unpack

    result = []
    for rollout, mask in zip(rollouts, masks):
        tokens = torch.tensor([rollout.sequence])
        record = FinishedTrajectory(rollout.record, np.zeros(tokens.shape[1], np.float32), mask)
        ones = torch.ones_like(tokens)
        with torch.no_grad(), replaying(model, [rollout.record], attention_mask=ones):
            logits = model(tokens).logits.float() / temperature
        with contextlib.nullcontext() if mask is None else corrected(unpack([record.pack()]), ones):
            log_probs = with_overrides(log_probs_of)(logits, tokens.roll(-1, dims=1))
        result.append(log_probs[0, len(rollout.prompt) - 1 : -1])
    return torch.cat(result)


def chat_prompts(llm: Any, questions: Sequence[str] = tuple(QUESTIONS), copies: int = 1) -> list[list[int]]:
    """Chat-templated token prompts, each question ``copies`` times."""
    tokenizer = llm.get_tokenizer()
    result = []
    for question in questions:
        message = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        result.extend([tokenizer.encode(text, add_special_tokens=False)] * copies)
    return result


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
    longest = max(len(r.sequence) for r in rollouts)
    tokens = torch.zeros(len(rollouts), longest, dtype=torch.int64, device=model.device)
    mask = torch.zeros_like(tokens)
    for row, rollout in enumerate(rollouts):
        tokens[row, : len(rollout.sequence)] = tokens.new_tensor(rollout.sequence)
        mask[row, : len(rollout.sequence)] = 1
    records = [r.record if replay else None for r in rollouts]
    with replaying(model, records, attention_mask=mask):
        logits = model(tokens, attention_mask=mask).logits
    result = []
    for row, rollout in enumerate(rollouts):
        start, end = len(rollout.prompt), len(rollout.sequence)
        chosen = tokens[row, start:end].unsqueeze(-1)
        scaled = logits[row, start - 1 : end - 1].float() / temperature
        if among is not None:
            left = tokens.new_tensor(among)
            scaled = torch.full_like(scaled, -torch.inf).index_copy(1, left, scaled[:, left])
        # Not log_softmax, which on a CPU is 6e-6 too high for rows as long as these: as the trainer takes it.
        result.append((scaled.gather(-1, chosen).squeeze(-1) - scaled.logsumexp(dim=-1)).cpu())
    return result


def gaps(model: Any, rollouts: Sequence[Rollout], replay: bool = True, temperature: float = 1.0) -> torch.Tensor:
    """|Δ log p| between rollout and replay at every generated token."""
    replayed = replay_log_probs(model, rollouts, temperature, replay)
    return torch.cat([(now - torch.from_numpy(r.log_probs.copy())).abs() for now, r in zip(replayed, rollouts)])


def assert_exact(llm: Any, model: Any, rate: float) -> tuple[list[Rollout], int]:
    """Sixteen answers of 80 tokens under the engine's perturbation are replayed, and leaving the replay out shows.

    Returns:
        The answers, and how many tokens they have.
    """
    rollouts = sample(llm, chat_prompts(llm, copies=4), max_tokens=80)
    gap = gaps(model, rollouts)
    # What OpenRLHF's importance sampling compares with the trainer's: vLLM's own log-probability, of the same token.
    for rollout in rollouts:
        np.testing.assert_allclose(rollout.engine_log_probs, rollout.log_probs, atol=1e-4)
    assert len(gap) >= 1000
    assert gap.max() <= 1e-4
    assert gap.mean() <= 1e-5
    assert abs(sum(len(r.record) for r in rollouts) - rate * len(gap)) <= 0.25 * rate * len(gap)
    without = gaps(model, rollouts[::4], replay=False)
    assert without.max() >= 1e-2, "leaving the replay out must show, or this test shows nothing"
    return rollouts, len(gap)


def feeds_its_text(rollouts: Sequence[Rollout]) -> bool:
    """Whether each recorded input is the token of the text at its position, as `cuts` feeds: no replay is needed."""
    return all(
        (r.record.weights == 1.0).all()
        and r.record.ids.tolist() == [[r.sequence[at]] for at in r.record.positions.tolist() if at < len(r.sequence)]
        for r in rollouts
    )


def by_token(record: ReplayRecord) -> np.ndarray:
    return np.take_along_axis(record.weights, np.argsort(record.ids, axis=-1), axis=-1)


def assert_same(first: Sequence[Rollout], second: Sequence[Rollout]) -> None:
    """Gates and noise bit for bit, tokens and weights up to float rounding.

    A token may flip where a draw falls within rounding of a boundary; what follows it is another trajectory. So the
    records are compared up to the first difference, and almost no trajectory may have one.
    """
    flips = 0
    for a, b in zip(first, second):
        assert a.record.seed == b.record.seed
        same = np.array(a.sequence) == np.array(b.sequence)
        length = len(same) if same.all() else int(same.argmin())
        flips += not same.all()
        left, right = a.record.truncate(length), b.record.truncate(length)
        np.testing.assert_array_equal(left.positions, right.positions)
        # By token: two candidates with near-equal logits may swap places.
        np.testing.assert_array_equal(np.sort(left.ids), np.sort(right.ids))
        np.testing.assert_allclose(by_token(left), by_token(right), atol=2e-4)
        if left.sigma is not None:
            np.testing.assert_array_equal(left.sigma, right.sigma)
    assert flips <= len(first) // 8


# --- what vLLM's scheduler is made to do, and what is seen of it ----------------------------------------------------


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def worker_of(llm: Any) -> Any:
    """The worker of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def note_preemptions(llm: Any) -> list[str]:
    """The requests that are preempted from now on, once for each time."""
    scheduler, preempted = scheduler_of(llm), []
    original = scheduler._preempt_request

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    return preempted


@contextlib.contextmanager
def one_token_prefills(llm: Any) -> Iterator[list[int]]:
    """Prompts are computed one token a step; yields how many tokens each request was given in each step."""
    scheduler, given = scheduler_of(llm), []
    config, schedule = scheduler.scheduler_config, scheduler.schedule
    before = config.long_prefill_token_threshold

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        given.extend(output.num_scheduled_tokens.values())
        return output

    config.long_prefill_token_threshold, scheduler.schedule = 1, noted
    try:
        yield given
    finally:
        config.long_prefill_token_threshold, scheduler.schedule = before, schedule
