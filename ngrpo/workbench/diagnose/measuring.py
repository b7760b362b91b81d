# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in this process for all strategies: the same model, the same prompts, the same random draws."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ngrpo.workbench.diagnose import inputs, probe
from ngrpo.workbench.diagnose.sample import GroupSampling, Sample
from ngrpo.workbench.evaluate.engine import Generated, Job, generate, render
from ngrpo.workbench.evaluate.engine import build as build_engine
from ngrpo.workbench.evaluate.rollout_policy import RolloutPolicy, noisy_engine
from perturbations.errors import require
from perturbations.seeds import trajectory_seed

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.tokenizers import TokenizerLike

    from ngrpo.config.arms import Arm
    from ngrpo.methods.sampling_schedules.base import SamplingSchedule
    from ngrpo.rollout.attach import AttachedPerturbation
    from ngrpo.workbench.evaluate import Problem

_CONCURRENT = 64
_WARM_UP_TOKENS = 16


def prompt_tokens(tokenizer: TokenizerLike, problem: Problem) -> list[int]:
    """The prompt as the model sees it: chat template with a generation prompt, or plain text where there is none."""
    return tokenizer.encode(render(tokenizer, problem), add_special_tokens=False)


def build(model: str, longest: int, *, hardware: str = "auto", dtype: str) -> LLM:
    """A ``vllm.LLM`` in this process whose perturbation can be swapped.

    Args:
        model: a local folder or a hub name.
        longest: tokens of the longest prompt and its answer.
        hardware: a hardware profile.
        dtype: as vLLM takes it.
    """
    # The records, the embedding and the probe's rows are read where they are: in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    options = {"dtype": dtype, "max_num_seqs": _CONCURRENT, "distributed_executor_backend": "uni"}
    return build_engine(model, {"name": probe.ADDRESS}, longest, hardware=hardware, options=options)


def attached(llm: LLM) -> AttachedPerturbation:
    """The worker's :class:`ngrpo.rollout.attach.AttachedPerturbation`, which is in this process."""

    def of(worker: Any) -> AttachedPerturbation:
        return worker.perturbation

    return llm.llm_engine.collective_rpc(of)[0]


def put(llm: LLM, strategy: Arm, schedule: SamplingSchedule | None = None) -> None:
    """Gives the engine a strategy's perturbation; an unperturbed one is drawn by the same code, with the same noise.

    Args:
        llm: of :func:`build`.
        strategy: which.
        schedule: what its temperature follows.
    """
    from ngrpo.rollout import set_perturbation

    attached(llm).schedule = schedule  # taken up with the perturbation
    set_perturbation(llm, **(strategy.spec or {"name": "none"}))


def sample_strategy(
    llm: LLM,
    strategy: Arm,
    problems: Sequence[Problem],
    sampling: GroupSampling,
    model: str = "",
    policy: RolloutPolicy = RolloutPolicy(),
) -> tuple[list[Sample], dict[str, Any]]:
    """Samples a group for every problem under one strategy and measures what needs the model.

    Args:
        llm: of :func:`build`.
        strategy: which.
        problems: the P problems.
        sampling: group size, length, temperature and seed.
        model: what the engine was built from; needed where the policy has noise.
        policy: what its rollouts have beside the perturbation.

    Returns:
        P × G samples, and ``tokens_per_second``, ``model_runner`` and the fields of
        :class:`ngrpo.workbench.diagnose.inputs.FedInputs`.
    """
    from ngrpo.workbench.evaluate import score

    put(llm, strategy, policy.schedule)
    tokenizer, group = llm.get_tokenizer(), sampling.group
    prompts = [prompt_tokens(tokenizer, problem) for problem in problems]
    texts = [render(tokenizer, problem) for problem in problems]
    jobs = [(prompt, trajectory_seed(sampling.seed, i), j) for i, prompt in enumerate(prompts) for j in range(group)]
    with noisy_engine(llm, model, policy):
        # Fills neighbor tables and compiles the sampler for this batch, so that the speed is that of a long run.
        _all(llm, jobs, replace(sampling, max_tokens=min(_WARM_UP_TOKENS, sampling.max_tokens)), policy.step)
        began = time.perf_counter()
        outputs = _all(llm, jobs, sampling, policy.step)
        seconds = time.perf_counter() - began
    answers = [answer.tokens for answer in outputs]
    records = [answer.record for answer in outputs if answer.record is not None]
    here = attached(llm)
    fed = inputs.measured(records, answers, here.embeddings, here.module)
    losses = losses_of(llm, [prompt for prompt, _, _ in jobs], answers)
    samples = []
    for answer, loss in zip(outputs, losses):
        prompt, member = divmod(answer.job, group)
        verdict = score(problems[prompt], answer.text, prompt=texts[prompt])
        samples.append(
            Sample(
                strategy=strategy.id,
                problem=problems[prompt].id,
                group=prompt,
                member=member,
                text=answer.text,
                tokens=answer.tokens,
                ended=answer.finish == "stop",
                reward=verdict.reward,
                correct=verdict.correct,
                extracted=verdict.extracted,
                parsed=verdict.parsed,
                nll=loss,
                record=answer.record if strategy.spec is not None else None,
            )
        )
    speed = sum(map(len, answers)) / seconds
    return samples, {"tokens_per_second": speed, **asdict(fed), "model_runner": here.runner_version}


def _all(llm: LLM, jobs: Sequence[Job], sampling: GroupSampling, step: int) -> list[Generated]:
    """All answers, in the order of the jobs."""
    parts = generate(llm, jobs, sampling, perturbed=True, reproducible=True, step=step, answers=sampling.group)
    return sorted(itertools.chain.from_iterable(parts), key=lambda answer: answer.job)


def losses_of(llm: LLM, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[float]:
    """-log p of each answer under the unperturbed model at temperature 1, summed over its tokens, in nats.

    The text is fed as a plain prompt: no position of it is perturbed.

    Args:
        llm: of :func:`build`.
        prompts: the prompt of each answer.
        answers: generated tokens, at least one each.
    """
    from vllm import SamplingParams

    from ngrpo.rollout import take_trajectories

    plain = SamplingParams(max_tokens=1, prompt_logprobs=0, extra_args={"perturbation": {"enabled": False}})
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers)]
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], plain, use_tqdm=False)
    take_trajectories(llm)
    losses = []
    for prompt, text, output in zip(prompts, texts, outputs):
        pairs = list(zip(text, require(output.prompt_logprobs, "prompt_logprobs")))[len(prompt) :]
        losses.append(-sum(each[token].logprob for token, each in pairs if each))
    return losses
