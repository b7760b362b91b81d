# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine for evaluation, and samples streamed out of it as they finish."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ngrpo.config import compatibility
from ngrpo.machine.hardware import processes, profile_for
from ngrpo.machine.models import conversation
from ngrpo.workbench.scoring import Problem
from perturbations.errors import UsageError
from perturbations.options import Options, option
from perturbations.seeds import trajectory_seed

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.tokenizers import TokenizerLike

    from perturbations.replay import ReplayRecord

# Requests that wait inside the engine; more than any engine runs at once, few enough to be cheap.
_WINDOW = 2048
_OF_VLLM = ("temperature", "top_p", "max_tokens")

# The tokens of a prompt, the seed that all its samples share, and the sample's number among them.
Job = tuple[list[int], int, int]


@dataclass(frozen=True)
class Sampling(Options):
    """How responses are drawn. Seed, prompt, its number of earlier repeats and the sample's number determine a draw."""

    kind = "sampling"

    temperature: float = option(0.6, "0 is greedy", low=0)
    top_p: float = option(0.95, "the nucleus", above=0, high=1)
    max_tokens: int = option(4096, "the longest response", low=1)
    seed: int = option(0, "of all draws", low=0)


@dataclass(frozen=True)
class Generated:
    """One response.

    Attributes:
        job: its place in the list of jobs.
        text: without special tokens.
        tokens: all generated ones, with the end token.
        finish: ``stop``, or ``length`` where the limit cut it.
        record: of the perturbed inputs; None where the engine keeps no records.
    """

    job: int
    text: str
    tokens: list[int]
    finish: str
    record: ReplayRecord | None


def build(
    model: str,
    spec: Mapping[str, Any] | None,
    max_model_len: int,
    *,
    hardware: str = "auto",
    options: Mapping[str, Any] | None = None,
    schedule: Mapping[str, Any] | None = None,
) -> Any:
    """A ``vllm.LLM`` of a folder or hub name, with reproducible token draws, perturbed or not.

    Args:
        spec, schedule: of the perturbation and the sampling schedule, or None.
        max_model_len: tokens of prompt and response together.
        options: keyword arguments of ``vllm.LLM``, over the defaults here.

    Raises:
        UsageError: where vLLM refuses, or would refuse, the model or the options.
    """
    profile = profile_for(hardware)
    compatibility.check_model(model, profile.name)
    environment = {**profile.env, "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        sys.stdout.fileno()
    except (OSError, AttributeError):  # a notebook's stream; vLLM 0.29 needs a descriptor for an engine in this process
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    import vllm

    settings: dict[str, Any] = {
        "max_model_len": max_model_len,
        "enforce_eager": "--vllm.enforce_eager" in profile.default_flags,
        "disable_log_stats": True,
        **(options or {}),
    }
    # Without a perturbation too: token draws that depend on the request alone, whatever else is in the batch.
    config: dict[str, Any] = {"perturbation": dict(spec or {"name": "none"}), "seeded_draws": True}
    config |= {} if schedule is None else {"sampling_schedule": dict(schedule)}
    try:
        with processes.own_children():
            return vllm.LLM(model, additional_config=config, **settings)
    except (TypeError, ValueError) as error:  # vLLM's own checks of its arguments
        raise UsageError(f"vLLM does not start with {settings}: {error}") from error


def prepare(llm: LLM, spec: Mapping[str, Any] | None) -> bool:
    """Sets the perturbation of an engine built elsewhere, and returns whether its draws are reproducible.

    Raises ``RuntimeError`` where the engine has none installed, ``UsageError`` for a bad spec.
    """
    from ngrpo.rollout import set_perturbation

    if spec is not None:
        set_perturbation(llm, **spec)
    try:
        return all(llm.llm_engine.collective_rpc("perturbation_fingerprint"))
    except Exception:  # an engine without our plugin has no such procedure
        return False


def render(tokenizer: TokenizerLike, problem: Problem) -> str:
    """The prompt as the model sees it; ``UsageError`` with the problem's id where it cannot be rendered."""
    try:
        return conversation.rendered(tokenizer, problem.messages, problem.template)
    except UsageError as error:
        raise UsageError(f"problem {problem.id}: {error}") from None


def generate(
    llm: LLM,
    jobs: Sequence[Job],
    sampling: Sampling,
    *,
    perturbed: bool,
    reproducible: bool,
    step: int = 0,
    answers: int = 1,
) -> Generator[list[Generated], None, None]:
    """Responses to jobs, in the order in which they finish.

    Args:
        llm: an idle ``vllm.LLM``.
        perturbed: whether the engine's perturbation acts.
        reproducible: whether the engine has this project's token draws.
        step: the training step for a sampling schedule of the engine.
        answers: responses to each prompt, numbered from 0 on by the jobs' samples.

    Yields:
        The jobs that finished together. An iterator closed early aborts the running requests.
    """
    from ngrpo.rollout import take_records

    drawn_with = partial(parameters, sampling, perturbed, reproducible, step=step, answers=answers)
    engine = llm.llm_engine
    live: dict[str, int] = {}
    following = 0
    try:
        while live or following < len(jobs):
            while following < len(jobs) and len(live) < _WINDOW:
                job, name = jobs[following], f"eval-{following}"
                engine.add_request(name, {"prompt_token_ids": job[0]}, drawn_with(job))
                live[name] = following
                following += 1
            outputs: list[Any] = engine.step()
            done = {output.request_id: output.outputs[0] for output in outputs if output.finished}
            if not done:
                continue
            records = take_records(llm, [*done]) if reproducible else {}
            yield [
                Generated(
                    live.pop(name), answer.text, [*answer.token_ids], str(answer.finish_reason), records.get(name)
                )
                for name, answer in done.items()
            ]
    finally:
        if live:
            engine.abort_request(list(live))


def parameters(
    sampling: Sampling, perturbed: bool, reproducible: bool, job: Job, *, step: int = 0, answers: int = 1
) -> SamplingParams:
    """vLLM's parameters of a job's request; arguments as in :func:`generate`."""
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    _, seed, sample = job
    settings: dict[str, Any] = {}
    if reproducible:
        arguments = {"enabled": perturbed, "seed": seed, "sample": sample, **({"training_step": step} if step else {})}
        arguments |= {"answer": sample, "answers": answers} if answers > 1 else {}
        settings["extra_args"] = {"perturbation": arguments}
    elif torch.cuda.is_available():  # vLLM 0.29 on CPU fails with a seed per request once a prefill is chunked
        settings["seed"] = trajectory_seed(seed, sample)
    drawn: dict[str, Any] = {name: value for name, value in asdict(sampling).items() if name in _OF_VLLM}
    return SamplingParams(**drawn, output_kind=RequestOutputKind.FINAL_ONLY, **settings)
