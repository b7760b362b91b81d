# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine for evaluation, and samples streamed out of it as they finish."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from ngrpo.config import compatibility
from ngrpo.machine.hardware import processes, profile_for
from ngrpo.workbench.scoring import Problem
from perturbations.errors import UsageError
from perturbations.seeds import trajectory_seed

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.tokenizers import TokenizerLike

    from perturbations.replay import ReplayRecord

# Requests that wait inside the engine; more than any engine runs at once, few enough to be cheap.
_WINDOW = 2048

# The tokens of a prompt, the seed that all its samples share, and the sample's number among them.
Job = tuple[list[int], int, int]


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn: temperature 0 is greedy, ``max_tokens`` is the longest response.

    The seed, the problem's text, its number of earlier repeats and the sample's number determine every draw.
    """

    temperature: float = 0.6
    top_p: float = 0.95
    max_tokens: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        for name, fine, allowed in (
            ("temperature", 0.0 <= self.temperature < inf, "at least 0"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("seed", self.seed >= 0, "at least 0"),
        ):
            if not fine:
                raise UsageError(f"{name}={getattr(self, name)}: must be {allowed}.")


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
        model: a folder or hub name.
        spec: of the perturbation, or None.
        max_model_len: tokens of prompt and response together.
        hardware: a hardware profile.
        options: keyword arguments of ``vllm.LLM``, over the defaults here.
        schedule: the spec of a sampling schedule, or None.

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


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model folder or hub name; raises ``UsageError`` where it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except OSError as error:
        raise UsageError(f"model {model!r}: its tokenizer cannot be loaded: {error}") from None


def render(tokenizer: TokenizerLike, problem: Problem) -> str:
    """The prompt as the model sees it, as OpenRLHF renders it; the messages' text where there is no chat template."""
    if getattr(tokenizer, "chat_template", None):
        messages: list[Any] = list(problem.messages)
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    return "\n\n".join(message["content"] or "" for message in problem.messages) + "\n"


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
        jobs: one for each response.
        sampling: how to draw.
        perturbed: whether the engine's perturbation acts.
        reproducible: whether the engine has this project's token draws.
        step: the training step for a sampling schedule of the engine.
        answers: responses to each prompt, numbered from 0 on by the jobs' samples.

    Yields:
        Those that finished together. An iterator closed early aborts the running requests.
    """
    from ngrpo.rollout import take_records

    engine = llm.llm_engine
    live: dict[str, int] = {}
    following = 0
    try:
        while live or following < len(jobs):
            while following < len(jobs) and len(live) < _WINDOW:
                name = f"eval-{following}"
                params = _params(sampling, jobs[following], perturbed, reproducible, step, answers)
                engine.add_request(name, {"prompt_token_ids": jobs[following][0]}, params)
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


def _params(sampling: Sampling, job: Job, perturbed: bool, reproducible: bool, step: int, answers: int = 1) -> Any:
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
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **settings,
    )
