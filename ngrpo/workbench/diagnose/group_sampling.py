# SPDX-License-Identifier: Apache-2.0
"""Groups of responses under one arm after another: one vLLM engine, the same prompts and random draws."""

from __future__ import annotations

import base64
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ngrpo.machine.hardware import profile_for
from ngrpo.machine.upstream.types import LLM, TokenizerLike
from ngrpo.methods.tasks import score
from ngrpo.workbench.evaluate.engine import Generated, Job, RolloutPolicy, Sampling, generate, noisy_engine, render
from ngrpo.workbench.evaluate.engine import build as build_engine
from perturbations import Perturbation, Proposal, Step, option
from perturbations.edit import one_hot
from perturbations.embeddings import ModelEmbeddings, nearest_tokens
from perturbations.errors import require
from perturbations.replay import ReplayRecord
from perturbations.replay.scope import ReplayScope
from perturbations.seeds import trajectory_seed

if TYPE_CHECKING:
    from ngrpo.config.arms import Arm
    from ngrpo.methods.sampling_schedules.base import SamplingSchedule
    from ngrpo.rollout.attach import AttachedPerturbation
    from ngrpo.workbench.evaluate import Problem

_CONCURRENT = 64
_WARM_UP_TOKENS = 16
# The standard error of a fraction of this many inputs is at most 0.5 / √2048 = 0.011.
_MOST_INPUTS = 2048

# --- samples ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupSampling(Sampling):
    """How the responses of a group are drawn; ``group`` is their number."""

    temperature: float = option(1.0, "0 is greedy", low=0)
    top_p: float = option(1.0, "the nucleus", above=0, high=1)
    max_tokens: int = option(256, "the longest response", low=1)
    group: int = option(8, "diversity is between its responses", low=2)


@dataclass(frozen=True)
class Sample:
    """One response of one arm, with the scorer's verdict. The names of its fields are the keys of ``samples.jsonl``.

    Attributes:
        strategy: the arm's id.
        problem: the problem's id.
        group: the number of the prompt, from 0.
        member: the number of the response in its group, from 0.
        text: without special tokens.
        tokens: all generated tokens, the end token included.
        ended: whether the last token is the end token; False where the length limit cut the response.
        nll: -log p of the tokens under the unperturbed model at temperature 1, summed, in nats.
        record: the inputs of perturbed positions, or None for an unperturbed arm.
    """

    strategy: str
    problem: str
    group: int
    member: int
    text: str
    tokens: list[int]
    ended: bool
    reward: float
    correct: bool
    extracted: str | None
    parsed: bool
    nll: float
    record: ReplayRecord | None

    @property
    def response(self) -> list[int]:
        """The tokens without EOS."""
        return self.tokens[:-1] if self.ended else self.tokens

    @property
    def perturbed(self) -> list[int]:
        """Indices into ``tokens`` of perturbed inputs."""
        if self.record is None:
            return []
        positions = self.record.positions.astype(int) - self.record.prompt_tokens
        return positions[(positions >= 0) & (positions < len(self.tokens))].tolist()

    def to_json(self) -> dict[str, Any]:
        """A line of ``samples.jsonl``; the record is base64 of :meth:`ReplayRecord.to_bytes`."""
        packed = None if self.record is None else base64.b64encode(self.record.to_bytes()).decode()
        return {**vars(self), "perturbed": self.perturbed, "record": packed}

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Sample:
        """The inverse of :meth:`to_json`."""
        values: dict[str, Any] = {field.name: line[field.name] for field in fields(cls)}
        if values["record"] is not None:
            values["record"] = ReplayRecord.from_bytes(base64.b64decode(values["record"]))
        return cls(**values)


# --- the engine -------------------------------------------------------------------------------------

COPIES = 64
"""The number of steps that the probe keeps for each token, and of perturbed copies in the embedding map."""
LIKELIEST: dict[int, list[tuple[Tensor, int]]] = {}
"""Filled by the probe: for each token here, steps at which it was the likeliest, as z̃ (V,) float32 and position."""


@dataclass(frozen=True, kw_only=True)
class Probe(Perturbation):
    """Changes nothing, and fills :data:`LIKELIEST`. The engine starts with it."""

    paper = "none"

    until: str | None = option(None, "the whole response is watched")

    def propose(self, step: Step) -> Proposal:
        """The sampled tokens, unchanged."""
        if LIKELIEST:
            for row, token in enumerate(step.logits.argmax(dim=-1).tolist()):
                if token in LIKELIEST and len(LIKELIEST[token]) < COPIES:
                    logits = step.logits[row].float().cpu().clone()
                    LIKELIEST[token].append((logits, int(step.positions[row])))
        return Proposal(one_hot(step.sampled), step.sampled)


PROBE = f"{__name__}:{Probe.__name__}"


def prompt_tokens(tokenizer: TokenizerLike, problem: Problem) -> list[int]:
    """The tokens of the prompt as the model sees it."""
    return tokenizer.encode(render(tokenizer, problem), add_special_tokens=False)


def build(model: str, longest: int, *, hardware: str = "auto", dtype: str) -> LLM:
    """A ``vllm.LLM`` in this process with a replaceable perturbation; ``longest``: tokens of prompt and response."""
    # Records, embedding and the probe's steps are read in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    options = {
        **profile_for(hardware).engine_options,
        "dtype": dtype,
        "max_num_seqs": _CONCURRENT,
        "distributed_executor_backend": "uni",
    }
    return build_engine(model, {"name": PROBE}, longest, hardware=hardware, options=options)


def attached(llm: LLM) -> AttachedPerturbation:
    """The perturbation of the engine's worker, which runs in this process."""
    return llm.llm_engine.collective_rpc(attrgetter("perturbation"))[0]


def put(llm: LLM, arm: Arm, schedule: SamplingSchedule | None = None) -> None:
    """Gives the engine an arm's perturbation and sampling schedule.

    An unperturbed arm gets the perturbation ``none``, so that it runs the same code with the same draws.
    """
    from ngrpo.rollout import set_perturbation

    attached(llm).schedule = schedule  # read by set_perturbation
    set_perturbation(llm, **(arm.spec or {"name": "none"}))


# --- sampling ---------------------------------------------------------------------------------------


def sample_arm(
    llm: LLM,
    arm: Arm,
    problems: Sequence[Problem],
    sampling: GroupSampling,
    model: str = "",
    policy: RolloutPolicy = RolloutPolicy(),
) -> tuple[list[Sample], dict[str, Any]]:
    """Samples a group of G for each of P problems under one arm and measures what needs the model.

    ``model`` is the engine's, and needed where the policy has noise.

    Returns:
        P × G samples, and ``tokens_per_second``, ``model_runner`` and :func:`fed_inputs`.
    """
    from ngrpo.rollout import model_runner

    put(llm, arm, policy.run.sampling_schedule)
    tokenizer = llm.get_tokenizer()
    texts = [render(tokenizer, problem) for problem in problems]
    jobs: list[Job] = []
    for number, text in enumerate(texts):
        prompt = tokenizer.encode(text, add_special_tokens=False)
        seed = trajectory_seed(sampling.seed, number)
        jobs += [Job(prompt, seed, member) for member in range(sampling.group)]

    def responses(limit: int) -> list[Generated]:
        batches = generate(
            llm,
            jobs,
            replace(sampling, max_tokens=limit),
            perturbed=True,
            reproducible=True,
            step=policy.step,
            responses=sampling.group,
        )
        return sorted(itertools.chain.from_iterable(batches), key=attrgetter("job"))

    with noisy_engine(llm, model, policy):
        # Fills neighbor tables and compiles the sampler for this batch, so that the speed is that of a long run.
        responses(min(_WARM_UP_TOKENS, sampling.max_tokens))
        began = time.perf_counter()
        outputs = responses(sampling.max_tokens)
        seconds = time.perf_counter() - began

    tokens = [output.tokens for output in outputs]
    records = [require(output.record, "record") for output in outputs]
    perturbation = attached(llm)
    fed = fed_inputs(records, tokens, perturbation.embeddings, perturbation.module)
    losses = losses_of(llm, [job.prompt for job in jobs], tokens)
    samples = []
    for output, loss in zip(outputs, losses):
        number, member = divmod(output.job, sampling.group)
        problem = problems[number]
        verdict = score(problem, output.text, prompt=texts[number], end=output.end(tokenizer))
        sample = Sample(
            strategy=arm.id,
            problem=problem.id,
            group=number,
            member=member,
            text=output.text,
            tokens=output.tokens,
            ended=output.finish == "stop",
            reward=verdict.reward,
            correct=verdict.correct,
            extracted=verdict.extracted,
            parsed=verdict.parsed,
            nll=loss,
            record=None if arm.spec is None else output.record,
        )
        samples.append(sample)
    speed = sum(map(len, tokens)) / seconds
    return samples, {"tokens_per_second": speed, **fed, "model_runner": model_runner(llm)}


def losses_of(llm: LLM, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> list[float]:
    """-log p of each response under the unperturbed model at temperature 1, summed over its tokens, in nats."""
    from vllm import SamplingParams

    from ngrpo.rollout import take_trajectories

    # Prompt and response are one prompt, so that no position is perturbed.
    plain = SamplingParams(max_tokens=1, prompt_logprobs=0, extra_args={"perturbation": {"enabled": False}})
    texts = [[*prompt, *response] for prompt, response in zip(prompts, responses)]
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], plain, use_tqdm=False)
    take_trajectories(llm)
    losses = []
    for prompt, text, output in zip(prompts, texts, outputs):
        by_position = require(output.prompt_logprobs, "prompt_logprobs")
        pairs = list(zip(text, by_position))[len(prompt) :]
        log_probs = [log_prob_of[token].logprob for token, log_prob_of in pairs if log_prob_of]
        losses.append(-sum(log_probs))
    return losses


def fed_inputs(
    records: Sequence[ReplayRecord],
    responses: Sequence[Sequence[int]],
    embeddings: ModelEmbeddings,
    module: nn.Module | None,
) -> dict[str, float | None]:
    """Where perturbed inputs lie among the embeddings, by at most 2,048 of them, evenly spaced; None where none is.

    Returns:
        ``anchor_nearest``, the fraction nearest to the anchor, the heaviest candidate; ``text_nearest``,
        the fraction nearest to the token in the text, x; and ``relative_shift``, the mean of
        ‖e′ − E[x]‖ / ‖E[x]‖, which a training logs as ``shift``.
    """
    inputs = [(number, row) for number, record in enumerate(records) for row in range(len(record))]
    if not inputs:
        return dict.fromkeys(("anchor_nearest", "text_nearest", "relative_shift"))
    spaced = np.linspace(0, len(inputs) - 1, min(_MOST_INPUTS, len(inputs))).astype(int)
    chosen = [inputs[index] for index in np.unique(spaced)]
    matrix = embeddings.matrix()
    vectors, anchors, written = [], [], []
    for number, pairs in itertools.groupby(chosen, key=itemgetter(0)):
        record = records[number]
        rows = np.array([row for _, row in pairs])
        positions = record.positions[rows]
        heaviest = record.weights[rows].argmax(axis=1)
        vectors.append(recorded_inputs(record, positions, matrix, module))
        anchors += record.ids[rows, heaviest].tolist()
        written += [responses[number][position - record.prompt_tokens] for position in positions]
    fed = torch.cat(vectors)
    anchor, text = torch.tensor([anchors, written], dtype=torch.int64, device=fed.device)
    nearest = nearest_tokens(fed, matrix, anchor)
    plain = matrix[text].double()
    shifts = (fed.double() - plain).norm(dim=-1) / plain.norm(dim=-1)
    shifts = shifts.nan_to_num(posinf=0.0)  # a token with an embedding of zeros has no relative shift
    return {
        "anchor_nearest": float((nearest == anchor).double().mean()),
        "text_nearest": float((nearest == text).double().mean()),
        "relative_shift": float(shifts.mean()),
    }


def recorded_inputs(record: ReplayRecord, positions: np.ndarray, matrix: Tensor, module: nn.Module | None) -> Tensor:
    """The inputs (N, D) at some perturbed positions, replayed as in a training."""
    embedding = nn.Embedding.from_pretrained(matrix)
    tokens = torch.zeros(1, record.num_tokens, dtype=torch.int64, device=matrix.device)
    with torch.no_grad(), ReplayScope(embedding, measure=False, module=module)([record], None):
        return embedding(tokens)[0, torch.from_numpy(positions.astype(np.int64)).to(matrix.device)]
