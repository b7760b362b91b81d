# SPDX-License-Identifier: Apache-2.0
"""From samples to Mean@n and Pass@k: `evaluation.json` and the table on the screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ngrpo.workbench.evaluate.rollout_policy import DESCRIBED
from ngrpo.workbench.scoring import TIMED_OUT, Problem
from ngrpo.workbench.statistics import mean_at_n, pass_at_k
from perturbations.errors import UsageError

DEFAULT_KS = (1, 4, 8, 16, 32)


def checked_ks(ks: Sequence[int] | None, n: int) -> tuple[int, ...]:
    """The k of Pass@k, sorted; by default those of 1, 4, 8, 16, 32 up to n.

    Raises:
        UsageError: for n below 1, or a k outside [1, n].
    """
    if n < 1:
        raise UsageError(f"n={n}: must be at least 1 sample per problem.")
    if ks is None:
        return tuple(k for k in DEFAULT_KS if k <= n)
    for k in ks:
        if not 1 <= k <= n:
            raise UsageError(f"k={k}: Pass@k of n={n} samples needs k in [1, {n}]. Draw more with --n.")
    return tuple(sorted(set(ks)))


def summarise(
    settings: Mapping[str, Any],
    problems: Sequence[Problem],
    samples: Sequence[Mapping[str, Any]],
    ks: Sequence[int],
    seconds: float,
    runner: str | None,
) -> dict[str, Any]:
    """The content of `evaluation.json`.

    Args:
        settings: of the folder.
        problems: in order.
        samples: n for each problem.
        ks: for Pass@k.
        seconds: the time of sampling in the last run, without loading.
        runner: vLLM's model runner, where it is known.
    """
    from ngrpo.machine.upstream.versions import machine, versions

    n = settings["n"]
    right = Counter(sample["problem"] for sample in samples if sample["correct"])
    counts = [(problem.id, right[problem.id]) for problem in problems]
    tokens = sum(sample["tokens"] for sample in samples)
    result = {
        "format": 1,
        **{key: settings[key] for key in DESCRIBED if key in settings},
        **{key: settings[key] for key in ("model", "dataset", "scorer", "n", "sampling", "perturbation")},
        "versions": versions(runner),
        "machine": machine(),
        "seconds": round(seconds, 1),
        "mean_at_n": _mean([mean_at_n(n, c) for _, c in counts]),
        "pass_at_k": {str(k): _mean([pass_at_k(n, c, k) for _, c in counts]) for k in ks},
        "reward": _mean([sample["reward"] for sample in samples]),
        "parsed": _mean([float(sample["parsed"]) for sample in samples]),
        "timed_out": _mean([float(sample.get("verdict") == TIMED_OUT) for sample in samples]),
        "cut": _mean([float(sample["finish"] == "length") for sample in samples]),
        "tokens_per_answer": tokens / len(samples),
        "problems": [{"id": name, "n": n, "correct": c} for name, c in counts],
    }
    perturbed = [sample["perturbed"] for sample in samples if sample.get("perturbed") is not None]
    if perturbed:
        result["perturbed_rate"] = sum(perturbed) / max(1, tokens)
    return result


def table(result: Mapping[str, Any], folder: object) -> str:
    """The result for people."""
    sampling, problems, n = result["sampling"], result["problems"], result["n"]
    spec = result["perturbation"] or {"name": "off"}
    drawn_with = [f"{key.replace('_', ' ')} {result[key]['name']}" for key in DESCRIBED[:2] if key in result]
    always = sum(problem["correct"] == n for problem in problems)
    never = sum(problem["correct"] == 0 for problem in problems)
    lines = [
        "",
        f"model         {result['model']}",
        f"problems      {result['dataset']}: {len(problems)} × {n} samples, checked by {result['scorer']}",
        f"sampling      temperature {sampling['temperature']:g}, top-p {sampling['top_p']:g}, at most"
        f" {sampling['max_tokens']} tokens, seed {sampling['seed']}",
        f"perturbation  {spec['name']}" + (f" rate={spec['rate']}" if "rate" in spec else ""),
    ]
    if drawn_with:
        sigma = f", σ {result['sigma']:g}" if "sigma" in result else ""
        lines.append(f"drawn with    {', '.join(drawn_with)}{sigma}, of training step {result['training_step']}")
    lines += [
        "",
        f"Mean@{n:<7}  {result['mean_at_n']:.3f}",
        *(f"Pass@{k:<7}  {value:.3f}" for k, value in result["pass_at_k"].items()),
        "",
        f"answers       {result['parsed']:.0%} readable, {result['cut']:.0%} cut by the length limit,"
        f" {result['timed_out']:.0%} timed out in scoring, {result['tokens_per_answer']:.0f} tokens on average",
        f"solved        {always} always, {len(problems) - always - never} sometimes, {never} never",
    ]
    if "perturbed_rate" in result:
        lines.append(f"perturbed     {result['perturbed_rate']:.3f} of the generated positions")
    return "\n".join([*lines, f"samples       {folder}", ""])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
