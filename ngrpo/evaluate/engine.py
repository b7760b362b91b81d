"""A vLLM engine for evaluation, and samples streamed out of it as they finish."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ngrpo.evaluate.problem import Problem
from perturbations.streams import trajectory_seed

# Requests that wait inside the engine; more than any engine runs at once, few enough to be cheap.
_WINDOW = 2048


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn.

    Attributes:
        temperature: 0 is greedy.
        top_p: in (0, 1].
        max_tokens: longest answer, in tokens.
        seed: with the problem's text and the sample's number it decides every draw.
    """

    temperature: float = 0.6
    top_p: float = 0.95
    max_tokens: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        for name, fine, allowed in (
            ("temperature", self.temperature >= 0.0, "at least 0"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
        ):
            if not fine:
                raise ValueError(f"{name}={getattr(self, name)}: must be {allowed}.")


@dataclass(frozen=True)
class Generated:
    """One answer.

    Attributes:
        job: its place in the list of jobs.
        text: without special tokens.
        tokens: how many were generated.
        finish: ``stop``, or ``length`` where the limit cut it.
        perturbed: perturbed positions; None where the engine keeps no records.
    """

    job: int
    text: str
    tokens: int
    finish: str
    perturbed: int | None


def build(
    model: str,
    spec: Mapping[str, Any] | None,
    max_model_len: int,
    *,
    hardware: str = "auto",
    options: Mapping[str, Any] | None = None,
) -> Any:
    """A ``vllm.LLM`` with reproducible token draws, perturbed or not.

    Args:
        model: a folder or hub name.
        spec: the perturbation, or None.
        max_model_len: prompt and answer together.
        hardware: a hardware profile.
        options: keyword arguments of ``vllm.LLM``, over the defaults here.
    """
    from ngrpo.hardware import profile_for

    profile = profile_for(hardware)
    for name, value in {**profile.env, "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    import vllm

    settings: dict[str, Any] = {
        "max_model_len": max_model_len,
        "enforce_eager": "--vllm.enforce_eager" in profile.default_flags,
        "disable_log_stats": True,
        **(options or {}),
    }
    # Without a perturbation too: token draws that depend on the request alone, whatever else is in the batch.
    perturbation = dict(spec or {"name": "none"})
    return vllm.LLM(model, additional_config={"perturbation": perturbation, "seeded_draws": True}, **settings)


def prepare(llm: Any, spec: Mapping[str, Any] | None) -> bool:
    """Makes an engine that somebody else built ready, and tells whether its draws are reproducible.

    Raises:
        RuntimeError: for a perturbation where the engine has none installed.
        ValueError: for a bad spec.
    """
    from ngrpo.rollout import set_perturbation

    if spec is not None:
        set_perturbation(llm, **spec)
    try:
        return all(llm.llm_engine.collective_rpc("perturbation_fingerprint"))
    except Exception:  # an engine without our plugin has no such procedure
        return False


def render(tokenizer: Any, problem: Problem) -> str:
    """The prompt as the model sees it; a tokenizer without a chat template gets the messages' text."""
    if getattr(tokenizer, "chat_template", None):
        return tokenizer.apply_chat_template(list(problem.messages), add_generation_prompt=True, tokenize=False)
    return "\n\n".join(message["content"] for message in problem.messages) + "\n"


def generate(
    llm: Any,
    jobs: Sequence[tuple[list[int], int]],
    sampling: Sampling,
    *,
    perturbed: bool,
    reproducible: bool,
) -> Iterator[list[Generated]]:
    """Answers in the order in which they finish.

    Args:
        llm: an idle ``vllm.LLM``.
        jobs: prompt tokens and the sample's number among that prompt's.
        sampling: how to draw.
        perturbed: whether the engine's perturbation acts.
        reproducible: whether the engine has this project's token draws.

    Yields:
        Those that finished together. An iterator closed early aborts what is still running.
    """
    from ngrpo.rollout import take_records

    engine = llm.llm_engine
    live: dict[str, int] = {}
    following = 0
    try:
        while live or following < len(jobs):
            while following < len(jobs) and len(live) < _WINDOW:
                tokens, sample = jobs[following]
                name = f"eval-{following}"
                engine.add_request(
                    name, {"prompt_token_ids": tokens}, _params(sampling, tokens, sample, perturbed, reproducible)
                )
                live[name] = following
                following += 1
            done = [output for output in engine.step() if output.finished]
            if not done:
                continue
            records = take_records(llm, [output.request_id for output in done]) if reproducible else {}
            found = []
            for output in done:
                answer, record = output.outputs[0], records.get(output.request_id)
                count = None if record is None else len(record)
                found.append(
                    Generated(
                        live.pop(output.request_id),
                        answer.text,
                        len(answer.token_ids),
                        str(answer.finish_reason),
                        count,
                    )
                )
            yield found
    finally:
        if live:
            engine.abort_request(list(live))


def _params(sampling: Sampling, prompt: list[int], sample: int, perturbed: bool, reproducible: bool) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # Of the prompt's tokens rather than its number, so that a problem's answers do not depend on --limit.
    seed = trajectory_seed(sampling.seed, json.dumps(prompt))
    settings: dict[str, Any] = {}
    if reproducible:
        settings["extra_args"] = {"perturbation": {"enabled": perturbed, "seed": seed, "sample": sample}}
    elif _seeds_work():
        settings["seed"] = trajectory_seed(seed, sample)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **settings,
    )


def _seeds_work() -> bool:
    """vLLM 0.29 on CPU fails with a seed per request once a prefill is chunked."""
    import torch

    return torch.cuda.is_available()
