# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a model: sample, check, keep, count."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngrpo.machine.console.progress import span
from ngrpo.machine.hardware import profile_for
from ngrpo.machine.models import packaged
from ngrpo.machine.storage.datafiles import contents
from ngrpo.machine.storage.result_folder import SETTINGS, ResultFolder
from ngrpo.workbench.evaluate import engine as engines
from ngrpo.workbench.evaluate.engine import Sampling
from ngrpo.workbench.evaluate.outcome import checked_ks, summarise
from ngrpo.workbench.evaluate.rollout_policy import RolloutPolicy, noisy_folder
from ngrpo.workbench.evaluate.scorers import check_problems, check_scorer, score
from ngrpo.workbench.scoring import Problem, digest
from perturbations.errors import UsageError
from perturbations.seeds import trajectory_seed

if TYPE_CHECKING:
    from vllm import LLM

PROBLEMS, SAMPLES, RESULT = "problems.jsonl", "samples.jsonl", "evaluation.json"
_REPORT_SECONDS = 10.0

Report = Callable[[str], None]
Sample = dict[str, Any]


def evaluate(
    model: str | LLM,
    problems: Sequence[Problem],
    *,
    out: str | Path,
    n: int = 32,
    k: Sequence[int] | None = None,
    sampling: Sampling | None = None,
    perturbation: Mapping[str, Any] | None = None,
    policy: RolloutPolicy = RolloutPolicy(),
    dataset: str = "problems",
    hardware: str = "auto",
    engine_options: Mapping[str, Any] | None = None,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Samples n answers per problem, checks them and counts.

    Every sample goes to ``samples.jsonl`` as it finishes. Called again with the same settings and folder this goes on
    where it was stopped; a finished evaluation is only counted again. Same seed, same samples: see
    docs/evaluation.md on how far that reaches.

    Args:
        model: a packaged name, a folder or a hub name; or a live, idle ``vllm.LLM``. A live engine takes
            ``perturbation`` only if it was built with one, and keeps it afterwards.
        problems: with distinct ids.
        out: the folder.
        n: samples per problem.
        k: for Pass@k, each in [1, n]; None: those of 1, 4, 8, 16, 32.
        sampling: how answers are drawn.
        perturbation: a spec; None: the model as it is.
        policy: a sampling schedule and noise on the weights, for a model that is loaded here.
        dataset: what the problems are called in the result.
        hardware: a hardware profile, for a model that is loaded here.
        engine_options: keyword arguments of ``vllm.LLM``, for a model that is loaded here.
        report: called with lines of progress.

    Returns:
        The content of ``evaluation.json``, which is also written.

    Raises:
        UsageError: for bad settings, a folder with another evaluation, or one that cannot be written.
    """
    sampling = sampling or Sampling()
    if isinstance(model, str):
        model = packaged.resolve(model, report=report)
        engine_options = {**profile_for(hardware).engine_options, **(engine_options or {})}
    ks = checked_ks(k, n)
    check_problems(problems)
    settings = {
        "format": 1,
        "model": model if isinstance(model, str) else str(model.llm_engine.model_config.model),
        "weights": packaged.fingerprint(model) if isinstance(model, str) else None,
        "engine": dict(engine_options or {}),
        "dataset": dataset,
        "problems": len(problems),
        "digest": digest(problems),
        "scorer": ", ".join(sorted({problem.scorer for problem in problems})),
        "scorer_files": contents(problem.scorer for problem in problems),
        "n": n,
        "sampling": asdict(sampling),
        "perturbation": None if perturbation is None else dict(perturbation),
    }
    if not (policy.plain or isinstance(model, str)):
        raise UsageError("a sampling schedule or policy noise needs a model that is loaded here: give its name.")
    settings |= policy.described()
    with ResultFolder.opened(Path(out), report) as folder:
        folder.claim(settings)
        if not (folder.path / PROBLEMS).exists():
            folder.write_lines(PROBLEMS, map(asdict, problems))
        samples = _samples(folder)
        existing = {(sample["problem"], sample["sample"]) for sample in samples}
        missing = [(p, i) for p in problems for i in range(n) if (p.id, i) not in existing]
        seconds, runner = _known(folder)
        if missing:
            if samples:
                report(f"going on: {len(samples)} of {len(samples) + len(missing)} samples are in {out}")
            progress = _Progress(len(samples), len(samples) + len(missing), report)
            batches = _generate(
                model, problems, missing, n, sampling, perturbation, policy, hardware, engine_options, progress
            )
            with closing(batches):
                for rows in batches:
                    folder.append(SAMPLES, rows)
                    samples += rows
                    progress.tell(samples)
            seconds, runner = progress.seconds, progress.runner
        result = summarise(settings, problems, samples, ks, seconds, runner)
        folder.write(RESULT, result)
    return result


def rescore(
    folder: str | Path,
    *,
    scorer: str = "auto",
    k: Sequence[int] | None = None,
    report: Report = lambda line: None,
) -> dict[str, Any] | None:
    """Checks the samples of a folder again, without generating.

    Args:
        folder: of an evaluation.
        scorer: another scorer for all problems; ``auto`` keeps theirs.
        k: as in :func:`evaluate`.
        report: called with lines of progress.

    Returns:
        The new result; None where samples are missing: they are checked again, but there is nothing to count yet.

    Raises:
        UsageError: for a folder without an evaluation, or a bad scorer.
    """
    path = Path(folder)
    for name in (SETTINGS, PROBLEMS):
        if not (path / name).is_file():
            raise UsageError(f"--rescore {folder}: no {name} there. Give the --out folder of an evaluation.")
    if scorer != "auto":
        check_scorer(scorer)
    with ResultFolder.opened(path, report) as held:
        settings: dict[str, Any] = held.read(SETTINGS)
        samples = _samples(held)
        problems = []
        for row in held.lines(PROBLEMS, "id", "messages", "answer", "scorer"):
            row["messages"] = tuple(row["messages"])
            problems.append(Problem(**row))
        ks = checked_ks(k, settings["n"])
        if scorer != "auto":
            problems = [replace(problem, scorer=scorer) for problem in problems]
            settings = {**settings, "scorer": scorer, "digest": digest(problems)}
        settings = {**settings, "scorer_files": contents(problem.scorer for problem in problems)}
        by_id = {problem.id: problem for problem in problems}
        for sample in samples:
            sample.update(_verdict(by_id[sample["problem"]], sample["text"], sample["prompt"]))
        held.write_lines(SAMPLES, samples)
        held.write_lines(PROBLEMS, map(asdict, problems))
        held.write(SETTINGS, settings)
        expected = len(problems) * settings["n"]
        if len(samples) < expected:
            report(f"{len(samples)} of {expected} samples are there and were checked again; sample the rest first")
            return None
        result = summarise(settings, problems, samples, ks, *_known(held))
        held.write(RESULT, result)
    return result


def _samples(folder: ResultFolder) -> list[Sample]:
    """The samples so far; of two with the same number the first counts."""
    samples: dict[tuple[str, int], Sample] = {}
    for row in folder.lines(SAMPLES, "problem", "sample", "text"):
        samples.setdefault((row["problem"], row["sample"]), row)
    return list(samples.values())


def _generate(
    model: str | LLM,
    problems: Sequence[Problem],
    missing: Sequence[tuple[Problem, int]],
    n: int,
    sampling: Sampling,
    spec: Mapping[str, Any] | None,
    policy: RolloutPolicy,
    hardware: str,
    options: Mapping[str, Any] | None,
    progress: _Progress,
) -> Generator[list[Sample], None, None]:
    """Lines of ``samples.jsonl`` in the order in which they finish, each with its verdict."""
    from ngrpo.rollout import model_runner

    tokenizer = engines.load_tokenizer(model) if isinstance(model, str) else model.get_tokenizer()
    prompts = {p.id: engines.render(tokenizer, p) for p in problems}
    asked = dict.fromkeys(p.id for p, _ in missing)
    tokens = {key: tokenizer.encode(prompts[key], add_special_tokens=False) for key in asked}
    if isinstance(model, str):
        length = max(map(len, tokens.values())) + sampling.max_tokens
        _check_length(model, length, sampling.max_tokens)
        progress.report(f"loading {model}")
        with noisy_folder(model, policy) as weights:
            schedule = policy.specs.get("sampling_schedule")
            llm = engines.build(weights, spec, length, hardware=hardware, options=options, schedule=schedule)
        reproducible = True
    else:
        llm, reproducible = model, engines.prepare(model, spec)
        if not reproducible:
            progress.report("warning: this engine was built without a perturbation; on CPU its samples do not repeat")
    progress.runner = model_runner(llm) if reproducible else None
    progress.start()
    # Of the prompt's tokens rather than its number, so that a problem's answers do not depend on --limit.
    repeats = _repeats(prompts)
    again = {key: [count] if count else [] for key, count in repeats.items()}
    seeds = {key: trajectory_seed(sampling.seed, json.dumps(prompt), *again[key]) for key, prompt in tokens.items()}
    jobs = [(tokens[p.id], seeds[p.id], i) for p, i in missing]
    perturbed, step = spec is not None, policy.step
    # A schedule may give each of a problem's answers a temperature of its own.
    answers = 1 if policy.schedule is None else n
    kinds = {"perturbed": perturbed, "reproducible": reproducible, "step": step, "answers": answers}
    stream = engines.generate(llm, jobs, sampling, **kinds)
    with closing(stream):
        for batch in stream:
            rows = []
            for answer in batch:
                problem, index = missing[answer.job]
                row = {
                    "problem": problem.id,
                    "sample": index,
                    "prompt": prompts[problem.id],
                    "text": answer.text,
                    "tokens": len(answer.tokens),
                    "finish": answer.finish,
                    **_verdict(problem, answer.text, prompts[problem.id]),
                }
                if spec is not None:
                    row["perturbed"] = None if answer.record is None else len(answer.record)
                rows.append(row)
            yield rows


def _repeats(prompts: Mapping[str, str]) -> dict[str, int]:
    """How many problems before each one have its prompt; with equal seeds they would get equal answers."""
    asked: Counter[str] = Counter()
    repeats = {}
    for problem, prompt in prompts.items():
        repeats[problem] = asked[prompt]
        asked[prompt] += 1
    return repeats


def _known(folder: ResultFolder) -> tuple[float, str | None]:
    """Seconds and model runner of the last run that sampled into a folder."""
    last = folder.read(RESULT) or {}
    return last.get("seconds", 0.0), last.get("versions", {}).get("model runner")


class _Progress:
    """Lines of progress, every few seconds."""

    def __init__(self, before: int, total: int, report: Report) -> None:
        """``before``: samples that were there already; ``total``: with those that are missing."""
        self.report, self._before, self._total = report, before, total
        self.runner: str | None = None
        self.start()

    def start(self) -> None:
        """The engine has been loaded: from here on time counts."""
        self._began = self._last_report = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def tell(self, samples: Sequence[Sample]) -> None:
        """Some samples have been added."""
        now, done = time.monotonic(), len(samples)
        if now - self._last_report < _REPORT_SECONDS and done < self._total:
            return
        self._last_report = now
        mean = sum(sample["reward"] for sample in samples) / done
        left = self.seconds / (done - self._before) * (self._total - done)
        self.report(f"{done} of {self._total} samples, mean reward {mean:.3f}, {span(left)} left")


def _verdict(problem: Problem, text: str, prompt: str) -> dict[str, Any]:
    return score(problem, text, prompt=prompt).columns()


def _check_length(model: str, needed: int, max_tokens: int) -> None:
    from transformers import AutoConfig

    limit = getattr(AutoConfig.from_pretrained(model), "max_position_embeddings", None)
    if isinstance(limit, int) and needed > limit:
        raise UsageError(
            f"--max-tokens {max_tokens}: with the longest prompt that is {needed} positions, and {model} has {limit}."
            f" Use at most --max-tokens {max(1, max_tokens - (needed - limit))}."
        )
