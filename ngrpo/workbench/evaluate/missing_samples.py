# SPDX-License-Identifier: Apache-2.0
"""The samples that an evaluation's folder lacks: drawn, checked and appended to its file."""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from ngrpo.machine.console import Report, span
from ngrpo.machine.models import architecture, context, packaged
from ngrpo.machine.storage.result_folder import ResultFolder
from ngrpo.machine.upstream.types import LLM, TokenizerLike
from ngrpo.machine.upstream.versions import Conditions, conditions
from ngrpo.methods.scoring import Problem
from ngrpo.methods.tasks import score
from ngrpo.workbench.evaluate import engine as engines
from perturbations.errors import UsageError
from perturbations.seeds import trajectory_seed

SAMPLES = "samples.jsonl"
DRAWN_BY = "drawn_by.jsonl"
"""Name of the file with the conditions of each run that sampled into the folder."""
_REPORT_SECONDS = 10.0


def missing_samples(
    problems: Sequence[Problem], samples: Sequence[Mapping[str, Any]], n: int
) -> list[tuple[Problem, int]]:
    """The problems and the numbers, below n, of the samples that are still to be drawn."""
    existing = {(sample["problem"], sample["sample"]) for sample in samples}
    missing = []
    for problem in problems:
        missing += [(problem, number) for number in range(n) if (problem.id, number) not in existing]
    return missing


def sample_missing(
    folder: ResultFolder,
    problems: Sequence[Problem],
    samples: list[dict[str, Any]],
    missing: Sequence[tuple[Problem, int]],
    *,
    model: str | LLM,
    n: int,
    sampling: engines.Sampling,
    perturbation: Mapping[str, Any] | None,
    policy: engines.RolloutPolicy,
    hardware: str,
    engine_options: Mapping[str, Any] | None,
    report: Report,
) -> float:
    """Draws and checks the missing samples, and appends each batch to ``samples`` and to the folder's file.

    Args:
        model: the name of a model to load, or a live engine.
        n: samples of each problem; the other settings are those of `evaluation.evaluate`.

    Returns:
        The seconds that the sampling took.
    """
    if isinstance(model, str):
        trust_remote_code = (engine_options or {}).get("trust_remote_code")
        tokenizer = packaged.load_tokenizer(model, trust_remote_code=trust_remote_code)
    else:
        tokenizer = model.get_tokenizer()
    prompts = {problem.id: engines.render(tokenizer, problem) for problem in problems}
    jobs = _jobs(tokenizer, prompts, missing, sampling.seed)
    if isinstance(model, str):
        longest_prompt = max(len(job.prompt) for job in jobs)
        length = _checked_length(model, longest_prompt, sampling)
        report(f"loading {model}")
        llm = engines.build(model, perturbation, length, hardware=hardware, options=engine_options, policy=policy)
        reproducible = True
    else:
        llm = model
        reproducible = engines.prepare(model, perturbation)
    runner = None
    if reproducible:
        from ngrpo.rollout import model_runner

        runner = model_runner(llm)
    else:
        report("warning: this engine was built without a perturbation; on CPU its samples do not repeat")
    earlier = drawn_by(folder) if samples else []
    folder.write_lines(DRAWN_BY, [*earlier, conditions(runner)])
    began = time.monotonic()
    batches = engines.generate(
        llm,
        jobs,
        sampling,
        perturbed=perturbation is not None,
        reproducible=reproducible,
        step=policy.step,
        # A schedule may give each of a prompt's responses its own temperature.
        responses=1 if policy.run.sampling_schedule is None else n,
    )
    progress = _Progress(samples, len(missing), report)
    with closing(batches):
        for batch in batches:
            rows = [_scored(response, missing, prompts, tokenizer) for response in batch]
            if perturbation is not None:
                for row, response in zip(rows, batch):
                    row["perturbed"] = None if response.record is None else len(response.record)
            folder.append(SAMPLES, rows)
            samples += rows
            progress.tell()
    return time.monotonic() - began


def _jobs(
    tokenizer: TokenizerLike, prompts: Mapping[str, str], missing: Sequence[tuple[Problem, int]], run_seed: int
) -> list[engines.Job]:
    """The requests for missing samples, seeded by the prompt's tokens, so that --limit changes no problem's samples.

    Of several problems with the same prompt, the second and later ones have their number among them in the seed too.
    Without it their samples would be equal.
    """
    incomplete = {problem.id for problem, _ in missing}
    count_before: Counter[str] = Counter()
    prompt_and_seed = {}
    for name, prompt in prompts.items():
        if name in incomplete:
            tokens = tokenizer.encode(prompt, add_special_tokens=False)
            number_among_equals = [count_before[prompt]] if count_before[prompt] else []
            prompt_and_seed[name] = (tokens, trajectory_seed(run_seed, json.dumps(tokens), *number_among_equals))
        count_before[prompt] += 1
    return [engines.Job(*prompt_and_seed[problem.id], sample) for problem, sample in missing]


def _checked_length(model: str, longest_prompt: int, sampling: engines.Sampling) -> int:
    """The positions that the longest prompt and its response take; UsageError where the model has fewer."""
    length = longest_prompt + sampling.max_tokens
    path = architecture.find_config(model)
    limit = None if path is None else context.context_of(architecture.read_config(path))
    if limit is not None and length > limit:
        room = limit - longest_prompt
        fix = f"Use at most --max-tokens {room}." if room > 0 else "Leave that problem out, or use another model."
        raise UsageError(
            f"--max-tokens {sampling.max_tokens}: the longest prompt has {longest_prompt} tokens, so a response may"
            f" need {length} positions, and {model} has {limit}. {fix}"
        )
    return length


def _scored(
    response: engines.Generated,
    missing: Sequence[tuple[Problem, int]],
    prompts: Mapping[str, str],
    tokenizer: TokenizerLike,
) -> dict[str, Any]:
    """A line of ``samples.jsonl``: a response with its verdict. Its job is its place among the ``missing``."""
    problem, number = missing[response.job]
    prompt = prompts[problem.id]
    end = response.end(tokenizer)
    return {
        "problem": problem.id,
        "sample": number,
        "prompt": prompt,
        "text": response.text,
        "end": end,
        "tokens": len(response.tokens),
        "finish": response.finish,
        **score(problem, response.text, prompt=prompt, end=end).columns(),
    }


class _Progress:
    """Reports every ten seconds, and at the end, how far an evaluation is."""

    def __init__(self, samples: Sequence[Mapping[str, Any]], missing: int, report: Report) -> None:
        """``samples``: the list that grows; ``missing``: how many it lacks now."""
        self._samples = samples
        self._before = len(samples)
        self._total = len(samples) + missing
        self._report = report
        self._began = time.monotonic()
        self._told = self._began

    def tell(self) -> None:
        """Reports if it is time to."""
        now = time.monotonic()
        finished = len(self._samples)
        if now - self._told < _REPORT_SECONDS and finished < self._total:
            return
        self._told = now
        mean = sum(sample["reward"] for sample in self._samples) / finished
        seconds_per_sample = (now - self._began) / (finished - self._before)
        seconds_left = seconds_per_sample * (self._total - finished)
        self._report(f"{finished} of {self._total} samples, mean reward {mean:.3f}, {span(seconds_left)} left")


def drawn_by(folder: ResultFolder) -> list[Conditions]:
    """The conditions of each run that sampled into a folder; none in folders of earlier releases."""
    return [*folder.lines(DRAWN_BY, "versions", "machine")]
