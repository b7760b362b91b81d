# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a model: sampling, checking and Mean@n with Pass@k; and another check of kept samples."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ngrpo.machine.console import Report
from ngrpo.machine.hardware import profile_for
from ngrpo.machine.models import packaged
from ngrpo.machine.storage.datafiles import contents
from ngrpo.machine.storage.result_folder import SETTINGS, ResultFolder
from ngrpo.machine.upstream.types import LLM
from ngrpo.machine.upstream.versions import Conditions, conditions, differing_conditions
from ngrpo.methods.scoring import TIMED_OUT, Problem, digest
from ngrpo.methods.scoring.problems import with_readable_answer
from ngrpo.methods.scoring.reward_alarms import alarm_notes
from ngrpo.methods.tasks import FULL_SCORE, check_problems, check_scorer, score
from ngrpo.workbench.evaluate import engine as engines
from ngrpo.workbench.evaluate.missing_samples import SAMPLES, drawn_by, missing_samples, sample_missing
from ngrpo.workbench.statistics import mean_at_n, pass_at_k
from perturbations import registry
from perturbations.errors import UsageError

PROBLEMS = "problems.jsonl"
RESULT = "evaluation.json"
DEFAULT_KS = (1, 4, 8, 16, 32)
UNSCORED = {
    "cut": "were cut by the length limit",
    "unreadable": "have no readable answer",
    "timed_out": "timed out in scoring",
}
"""What is wrong with responses of which a score may say little, by the names that :func:`unscored` gives them."""


def evaluate(
    model: str | LLM,
    problems: Sequence[Problem],
    *,
    out: str | Path,
    n: int = 32,
    k: Sequence[int] | None = None,
    sampling: engines.Sampling | None = None,
    perturbation: Mapping[str, Any] | None = None,
    policy: engines.RolloutPolicy = engines.RolloutPolicy(),
    dataset: str = "problems",
    hardware: str = "auto",
    engine_options: Mapping[str, Any] | None = None,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Samples n responses per problem, checks them and counts.

    Finished samples go to ``samples.jsonl``; the same call resumes. docs/evaluation.md says how far a seed repeats.

    Args:
        model: a packaged name, a folder or a hub name; or a live, idle ``vllm.LLM``. A live engine takes
            ``perturbation`` only if it was built with one, and keeps it afterwards.
        problems: with distinct ids.
        k: for Pass@k, each in [1, n]; None: those of 1, 4, 8, 16, 32 up to n.
        perturbation: a spec; None: the model as it is.
        policy: sampling schedule and noise on the weights; like the next two not for a live engine.
        hardware: the hardware profile.
        engine_options: keyword arguments of ``vllm.LLM``.
        dataset: the problems' name in the result.
        report: called with lines of progress.

    Returns:
        The content of ``evaluation.json``.

    Raises:
        UsageError: for bad settings, a folder with another evaluation, or one that cannot be written.
    """
    sampling = sampling or engines.Sampling()
    weights = None
    live = None
    if isinstance(model, str):
        name = packaged.resolve(model, report=report)
        weights = packaged.fingerprint(name)
        engine_options = {**profile_for(hardware).engine_options, **(engine_options or {})}
    else:
        live, name = model, str(model.llm_engine.model_config.model)
    if perturbation is not None:
        perturbation = registry.create(**perturbation).spec()  # with the text of its file, if it is the user's
    ks = checked_ks(k, n)
    check_problems(problems)
    if live and policy.specs:
        raise UsageError("a sampling schedule or policy noise needs a model that is loaded here: give its name.")
    settings = _settings(
        problems,
        model=name,
        weights=weights,
        engine_options=engine_options,
        dataset=dataset,
        n=n,
        sampling=sampling,
        perturbation=perturbation,
        policy=policy,
    )
    with ResultFolder.opened(Path(out).expanduser(), report) as folder:
        folder.claim(settings)
        if not (folder.path / PROBLEMS).exists():
            folder.write_lines(PROBLEMS, map(asdict, problems))
        samples = read_samples(folder, SAMPLES, "problem", "sample", "text")
        missing = missing_samples(problems, samples, n)
        seconds = _last_seconds(folder)
        if missing:
            if samples:
                report(f"going on: {len(samples)} of {len(samples) + len(missing)} samples are in {out}")
            seconds = sample_missing(
                folder,
                problems,
                samples,
                missing,
                model=live or name,
                n=n,
                sampling=sampling,
                perturbation=perturbation,
                policy=policy,
                hardware=hardware,
                engine_options=engine_options,
                report=report,
            )
        result = summarise(settings, problems, samples, ks, seconds, drawn_by(folder))
        folder.write(RESULT, result)
    return result


def _settings(
    problems: Sequence[Problem],
    *,
    model: str,
    weights: str | None,
    engine_options: Mapping[str, Any] | None,
    dataset: str,
    n: int,
    sampling: engines.Sampling,
    perturbation: Mapping[str, Any] | None,
    policy: engines.RolloutPolicy,
) -> dict[str, Any]:
    """The settings of an evaluation, which all samples of one folder have in common."""
    return {
        "format": 1,
        "model": model,
        "weights": weights,
        "engine": dict(engine_options or {}),
        "dataset": dataset,
        "problems": len(problems),
        "digest": digest(problems),
        **_scorers(problems),
        "n": n,
        "sampling": asdict(sampling),
        "perturbation": perturbation,
        **policy.described(),
    }


def rescore(
    folder: str | Path, *, scorer: str = "auto", k: Sequence[int] | None = None, report: Report = lambda line: None
) -> dict[str, Any] | None:
    """Checks the samples of an evaluation's folder again, without generating; ``auto`` keeps the problems' scorers.

    Returns:
        The new result; None where samples are missing: the others are checked again, but nothing is counted.

    Raises:
        UsageError: for a folder without an evaluation, or a bad scorer.
    """
    path = Path(folder).expanduser()
    for name in (SETTINGS, PROBLEMS):
        if not (path / name).is_file():
            raise UsageError(f"--rescore {folder}: no {name} there. Give the --out folder of an evaluation.")
    with ResultFolder.opened(path, report) as held:
        settings: dict[str, Any] = held.read(SETTINGS)
        samples = read_samples(held, SAMPLES, "problem", "sample", "text")
        rows = held.lines(PROBLEMS, "id", "messages", "answer", "scorer")
        problems = [replace(Problem(**row), messages=tuple(row["messages"])) for row in rows]
        ks = checked_ks(k, settings["n"])
        if scorer != "auto":
            check_scorer(scorer)
            if scorer.endswith(".py"):
                for note in alarm_notes("--scorer", scorer):
                    report(f"warning: {note}")
            problems = [
                with_readable_answer(f"--rescore {folder}: {problem.id}", replace(problem, scorer=scorer))
                for problem in problems
            ]
            settings["digest"] = digest(problems)
        settings |= _scorers(problems)
        by_id = {problem.id: problem for problem in problems}
        for sample in samples:
            if sample["problem"] not in by_id:
                raise UsageError(
                    f"--rescore {folder}: {SAMPLES} has samples of the problem {sample['problem']!r}, which"
                    f" {PROBLEMS} lacks. Restore its line."
                )
            end = sample.get("end", "")  # which samples of earlier releases lack
            verdict = score(by_id[sample["problem"]], sample["text"], prompt=sample["prompt"], end=end)
            sample.update(verdict.columns())
        held.write_lines(SAMPLES, samples)
        held.write_lines(PROBLEMS, map(asdict, problems))
        held.write(SETTINGS, settings)
        expected = len(problems) * settings["n"]
        if len(samples) < expected:
            report(f"{len(samples)} of {expected} samples are there and were checked again; sample the rest first")
            return None
        result = summarise(settings, problems, samples, ks, _last_seconds(held), drawn_by(held))
        held.write(RESULT, result)
    return result


def _scorers(problems: Sequence[Problem]) -> dict[str, Any]:
    """The settings of the problems' scorers."""
    names = {problem.scorer for problem in problems}
    return {"scorer": ", ".join(sorted(names)), "scorer_files": contents(problem.scorer for problem in problems)}


def read_samples(folder: ResultFolder, name: str = SAMPLES, *keys: str, mend: bool = True) -> list[dict[str, Any]]:
    """The samples in a file of a folder, each with ``keys``; of two with the same number the first counts."""
    samples: dict[tuple[str | None, object], dict[str, Any]] = {}
    for line, row in enumerate(folder.lines(name, *keys, mend=mend)):
        # A file of another program may not number its samples: each of its lines is one.
        number = ("sample", row["sample"]) if "sample" in row else ("line", line)
        samples.setdefault((row.get("problem"), number), row)
    return list(samples.values())


def _last_seconds(folder: ResultFolder) -> float:
    """The time of sampling that a folder's result has; 0 where it has none."""
    return (folder.read(RESULT) or {}).get("seconds", 0.0)


# --- from samples to Mean@n and Pass@k --------------------------------------------------------------


def checked_ks(ks: Sequence[int] | None, n: int) -> tuple[int, ...]:
    """The k of Pass@k, sorted, by default those of 1, 4, 8, 16, 32 up to n; ``UsageError`` for one outside [1, n]."""
    if n < 1:
        raise UsageError(f"--n {n}: must be at least 1 sample per problem.")
    for k in ks or ():
        if not 1 <= k <= n:
            raise UsageError(f"--k {k}: Pass@k of {n} samples needs k in [1, {n}]. Draw more with --n.")
    chosen = {k for k in DEFAULT_KS if k <= n} if ks is None else set(ks)
    return tuple(sorted(chosen))


def summarise(
    settings: Mapping[str, Any],
    problems: Sequence[Problem],
    samples: Sequence[Mapping[str, Any]],
    ks: Sequence[int],
    seconds: float,
    drawn_by: Sequence[Conditions],
) -> dict[str, Any]:
    """The content of `evaluation.json`, from n samples for each problem.

    ``seconds`` is the last run's time of sampling; ``drawn_by`` has the conditions of each run that sampled.
    """
    n = settings["n"]
    right = Counter(sample["problem"] for sample in samples if sample["correct"])
    counts = [right[problem.id] for problem in problems]
    tokens = sum(sample["tokens"] for sample in samples)
    result = {
        "format": 1,
        **{key: settings[key] for key in engines.DESCRIBED if key in settings},
        **{key: settings[key] for key in ("model", "dataset", "scorer", "n", "sampling", "perturbation")},
        "digest": settings.get("digest"),  # which evaluations of earlier releases lack
        **(drawn_by[-1] if drawn_by else conditions()),
        "warnings": _warnings(samples, settings["scorer"], drawn_by),
        "seconds": round(seconds, 1),
        "mean_at_n": _mean(mean_at_n(n, c) for c in counts),
        "pass_at_k": {str(k): _mean(pass_at_k(n, c, k) for c in counts) for k in ks},
        "reward": _mean(sample["reward"] for sample in samples),
        **readability(samples),
        "tokens_per_answer": tokens / len(samples),
        "problems": [{"id": problem.id, "n": n, "correct": c} for problem, c in zip(problems, counts)],
    }
    perturbed = [sample["perturbed"] for sample in samples if sample.get("perturbed") is not None]
    if perturbed:
        result["perturbed_rate"] = sum(perturbed) / max(1, tokens)
    return result


def readability(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Which shares of the samples have a final answer, timed out in scoring, and were cut by the length limit."""
    return {
        "parsed": _mean(sample["parsed"] for sample in samples),
        "timed_out": _mean(sample.get("verdict") == TIMED_OUT for sample in samples),
        "cut": _mean(sample["finish"] == "length" for sample in samples),
    }


def unscored(evaluation: Mapping[str, Any]) -> dict[str, float | None]:
    """The shares of responses of which a score may say little; None where an evaluation does not have one."""
    parsed = evaluation.get("parsed")
    timed_out = evaluation.get("timed_out")
    unreadable = None if parsed is None else max(0.0, 1.0 - parsed - (timed_out or 0.0))
    return {"cut": evaluation.get("cut"), "unreadable": unreadable, "timed_out": timed_out}


def unscored_warnings(name: str, shares: Mapping[str, float | None]) -> list[str]:
    """A line for each of :func:`unscored`'s shares above a tenth."""
    return [
        f"{name}: {share:.0%} of the responses {UNSCORED[key]}"
        for key, share in shares.items()
        if round(share or 0.0, 9) > 0.1  # the mean of three tenths is 0.1 + 2e-17
    ]


def _warnings(samples: Sequence[Mapping[str, Any]], scorer: str, drawn_by: Sequence[Conditions]) -> list[str]:
    """What else may be wrong with an evaluation: samples of different software, a reward file with a scale of its own.

    A response counts as right from a score of 1 on; a reward file's reward is the score where it returns no other.
    """
    warnings = []
    differences = differing_conditions(drawn_by)
    if differences:
        warnings.append(
            f"the samples were drawn by runs that differ in {', '.join(differences)}. To draw all alike, give --out a"
            " new folder."
        )
    rewards = [sample["reward"] for sample in samples]
    rewards_are_scores = all(sample["correct"] == (sample["reward"] >= FULL_SCORE) for sample in samples)
    has_other_scale = max(rewards) > 1.0 or 0.0 < max(rewards) < FULL_SCORE
    if ".py" in scorer and rewards_are_scores and has_other_scale:
        warnings.append(
            f"the rewards of {scorer} are from {min(rewards):g} to {max(rewards):g}, and a response counts as right"
            " from 1 on. Let reward_func return 'scores' too, of 1 for right and 0 for wrong."
        )
    return warnings


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def table(result: Mapping[str, Any], folder: object) -> str:
    """The result for people."""
    sampling = result["sampling"]
    problems = result["problems"]
    n = result["n"]
    perturbation = result["perturbation"] or {"name": "off"}
    rate = f" rate={perturbation['rate']}" if "rate" in perturbation else ""
    drawn_with = [f"{kind.replace('_', ' ')} {result[kind]['name']}" for kind in engines.POLICY_KINDS if kind in result]
    always = sum(problem["correct"] == n for problem in problems)
    never = sum(problem["correct"] == 0 for problem in problems)
    lines = [
        "",
        f"model         {result['model']}",
        f"problems      {result['dataset']}: {len(problems)} × {n} samples, checked by {result['scorer']}",
        f"sampling      temperature {sampling['temperature']:g}, top-p {sampling['top_p']:g}, at most"
        f" {sampling['max_tokens']} tokens, seed {sampling['seed']}",
        f"perturbation  {perturbation['name']}{rate}",
    ]
    if drawn_with:
        sigma = f", σ {result['sigma']:g}" if "sigma" in result else ""
        lines.append(f"drawn with    {', '.join(drawn_with)}{sigma}, of training step {result['training_step']}")
    lines += [
        "",
        f"Mean@{n:<7}  {result['mean_at_n']:.3f}",
        *(f"Pass@{k:<7}  {value:.3f}" for k, value in result["pass_at_k"].items()),
        "",
        f"responses     {result['parsed']:.0%} readable, {result['cut']:.0%} cut by the length limit,"
        f" {result['timed_out']:.0%} timed out in scoring, {result['tokens_per_answer']:.0f} tokens on average",
        f"solved        {always} always, {len(problems) - always - never} sometimes, {never} never",
    ]
    if "perturbed_rate" in result:
        lines.append(f"perturbed     {result['perturbed_rate']:.3f} of the generated positions")
    warnings = [*unscored_warnings("this score", unscored(result)), *result["warnings"]]
    lines += [f"warning: {line}" for line in warnings]
    return "\n".join([*lines, f"samples       {folder}", ""])
