"""Evaluation of a model: sample, check, keep, count."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ngrpo import models
from ngrpo.evaluate import engine as engines
from ngrpo.evaluate.engine import Generated, Sampling
from ngrpo.evaluate.problem import Problem
from ngrpo.evaluate.results import checked_ks, summarise
from ngrpo.evaluate.scoring import check_scorer, score
from ngrpo.evaluate.store import PROBLEMS, RESULT, SAMPLES, SETTINGS, Sample, SampleStore

_REPORT_SECONDS = 10.0

Report = Callable[[str], None]


def evaluate(
    model: Any,
    problems: Sequence[Problem],
    *,
    out: str | Path,
    n: int = 32,
    k: Sequence[int] | None = None,
    sampling: Sampling | None = None,
    perturbation: Mapping[str, Any] | None = None,
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
        dataset: what the problems are called in the result.
        hardware: a hardware profile, for a model that is loaded here.
        engine_options: keyword arguments of ``vllm.LLM``, for a model that is loaded here.
        report: called with lines of progress.

    Returns:
        The content of ``evaluation.json``, which is also written.

    Raises:
        ValueError: for bad settings, a folder with another evaluation, or one that cannot be written.
    """
    sampling = sampling or Sampling()
    if isinstance(model, str):
        model = models.resolve(model, report=report)
    if not problems:
        raise ValueError("no problems to evaluate: the dataset is empty.")
    if n < 1:
        raise ValueError(f"n={n}: must be at least 1 sample per problem.")
    if len({problem.id for problem in problems}) < len(problems):
        raise ValueError("two problems have the same id; ids must be distinct.")
    ks = checked_ks(k, n)
    # A missing package or a broken reward file must show before an hour of sampling, not after it.
    for problem in {problem.scorer: problem for problem in problems}.values():
        score(problem, problem.answer)
    settings = {
        "format": 1,
        "model": model if isinstance(model, str) else str(model.llm_engine.model_config.model),
        "dataset": dataset,
        "problems": len(problems),
        "digest": _digest(problems),
        "scorer": ", ".join(sorted({problem.scorer for problem in problems})),
        "n": n,
        "sampling": asdict(sampling),
        "perturbation": None if perturbation is None else dict(perturbation),
    }
    with SampleStore(Path(out), report) as store:
        samples = store.begin(settings, problems)
        kept = {(sample["problem"], sample["sample"]) for sample in samples}
        missing = [(p, i) for p in problems for i in range(n) if (p.id, i) not in kept]
        seconds = _seconds(Path(out) / RESULT)
        if missing:
            if samples:
                report(f"going on: {len(samples)} of {len(samples) + len(missing)} samples are in {out}")
            llm = model if not isinstance(model, str) else None
            work = _Work(store, samples, len(missing), report)
            seconds = work.run(llm, model, missing, sampling, perturbation, hardware, engine_options)
        result = summarise(settings, problems, samples, ks, seconds)
        store.write(RESULT, result)
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
        ValueError: for a folder without an evaluation, or a bad scorer.
    """
    place = Path(folder)
    if not (place / SETTINGS).is_file():
        raise ValueError(f"--rescore {folder}: no {SETTINGS} there. Give the --out folder of an evaluation.")
    if scorer != "auto":
        check_scorer(scorer)
    with SampleStore(place, report) as store:
        settings, problems, samples = store.settings(), store.problems(), store.samples()
        ks = checked_ks(k, settings["n"])
        if scorer != "auto":
            problems = [replace(problem, scorer=scorer) for problem in problems]
            settings = {**settings, "scorer": scorer, "digest": _digest(problems)}
        by_id = {problem.id: problem for problem in problems}
        for sample in samples:
            sample.update(_verdict(by_id[sample["problem"]], sample["text"], sample["prompt"]))
        store.write(SAMPLES, samples)
        store.write(PROBLEMS, [asdict(problem) for problem in problems])
        store.write(SETTINGS, settings)
        expected = len(problems) * settings["n"]
        if len(samples) < expected:
            report(f"{len(samples)} of {expected} samples are there and were checked again; sample the rest first")
            return None
        seconds = _seconds(place / RESULT)
        result = summarise(settings, problems, samples, ks, seconds)
        store.write(RESULT, result)
    return result


class _Work:
    """Sampling what is missing, with progress."""

    def __init__(self, store: SampleStore, samples: list[Sample], missing: int, report: Report) -> None:
        self._store, self._samples, self._report = store, samples, report
        self._before, self._total = len(samples), len(samples) + missing
        self._began = self._told = time.monotonic()

    def run(
        self,
        llm: Any | None,
        model: Any,
        missing: Sequence[tuple[Problem, int]],
        sampling: Sampling,
        spec: Mapping[str, Any] | None,
        hardware: str,
        options: Mapping[str, Any] | None,
    ) -> float:
        """Samples and keeps; returns the seconds that took, without loading."""
        name = model if llm is None else None
        tokenizer = llm.get_tokenizer() if llm is not None else _tokenizer(model)
        prompts = {p.id: engines.render(tokenizer, p) for p, _ in missing}
        tokens = {key: tokenizer.encode(prompt, add_special_tokens=False) for key, prompt in prompts.items()}
        if name is not None:
            length = max(map(len, tokens.values())) + sampling.max_tokens
            _check_length(name, length, sampling.max_tokens)
            self._report(f"loading {name}")
            llm, reproducible = engines.build(name, spec, length, hardware=hardware, options=options), True
        else:
            reproducible = engines.prepare(llm, spec)
            if not reproducible:
                self._report("warning: this engine was built without a perturbation; on CPU its samples do not repeat")
        self._began = self._told = time.monotonic()
        jobs = [(tokens[p.id], i) for p, i in missing]
        stream = engines.generate(llm, jobs, sampling, perturbed=spec is not None, reproducible=reproducible)
        try:
            for found in stream:
                self._keep(found, missing, prompts, spec is not None)
        finally:
            stream.close()
        return time.monotonic() - self._began

    def _keep(
        self,
        found: Sequence[Generated],
        missing: Sequence[tuple[Problem, int]],
        prompts: Mapping[str, str],
        perturbed: bool,
    ) -> None:
        rows = []
        for answer in found:
            problem, index = missing[answer.job]
            row = {
                "problem": problem.id,
                "sample": index,
                "prompt": prompts[problem.id],
                "text": answer.text,
                "tokens": answer.tokens,
                "finish": answer.finish,
                **_verdict(problem, answer.text, prompts[problem.id]),
            }
            if perturbed:
                row["perturbed"] = answer.perturbed
            rows.append(row)
        self._store.append(rows)
        self._samples += rows
        self._tell()

    def _tell(self) -> None:
        now, done = time.monotonic(), len(self._samples)
        if now - self._told < _REPORT_SECONDS and done < self._total:
            return
        self._told = now
        mean = sum(sample["reward"] for sample in self._samples) / done
        left = (now - self._began) / (done - self._before) * (self._total - done)
        self._report(f"{done} of {self._total} samples, mean reward {mean:.3f}, {_clock(left)} left")


def _verdict(problem: Problem, text: str, prompt: str) -> dict[str, Any]:
    return asdict(score(problem, text, prompt=prompt))


def _digest(problems: Sequence[Problem]) -> str:
    rows = [[p.id, list(p.messages), p.answer, p.scorer] for p in problems]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def _check_length(model: str, needed: int, max_tokens: int) -> None:
    from transformers import AutoConfig

    limit = getattr(AutoConfig.from_pretrained(model), "max_position_embeddings", None)
    if isinstance(limit, int) and needed > limit:
        raise ValueError(
            f"--max-tokens {max_tokens}: with the longest prompt that is {needed} positions, and {model} has {limit}."
            f" Use at most --max-tokens {max(1, max_tokens - (needed - limit))}."
        )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


def _seconds(result: Path) -> float:
    try:
        return float(json.loads(result.read_text(encoding="utf-8"))["seconds"])
    except (OSError, ValueError, KeyError):
        return 0.0
