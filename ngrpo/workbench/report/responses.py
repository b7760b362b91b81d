# SPDX-License-Identifier: Apache-2.0
"""Responses side by side, perturbed positions marked: samples of a diagnosis, and the groups that a run kept."""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ngrpo.workbench.report.drawing import Series
from ngrpo.workbench.report.values import format_number, number, plural, rows, shortened, shown, token

MOST_BYTES = 1_500_000
"""Of all kept groups of a page, as JSON; the page names the number of steps left out."""
_MOST_CANDIDATES = 12
_MOST_BARS = 10


def samples(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any] | None:
    """One block per problem: question, reference, and each strategy's response in a column."""
    problems: list[dict[str, Any]] = []
    for sample in rows(diagnosis, "samples"):
        problems.append({**sample, "short": shortened(sample.get("problem") or ""), "answers": []})
        for answer in rows(sample, "by_strategy"):
            name, tokens = str(answer.get("strategy")), rows(answer, "tokens")
            changed = sum(bool(one.get("perturbed")) for one in tokens)
            reward = format_number(answer.get("reward"), 2)
            facts = f"reward {reward} · {changed} of {plural(len(tokens), 'token')} perturbed"
            marked = [_marked(one) for one in tokens]
            problems[-1]["answers"].append({"name": name, "series": series.get(name), "facts": facts, "tokens": marked})
    return {"problems": problems} if problems else None


def _marked(one: Mapping[str, Any], more: Sequence[str] = ()) -> dict[str, Any]:
    """A token's text; for a perturbed one its tooltip, with ``more`` lines, and whether a line ends after it."""
    raw = str(one.get("text") or "")
    text = raw.replace("\n", "⏎\n").replace("\t", "⇥\t")
    if not one.get("perturbed"):
        return {"text": text}
    pairs = [(name, weight) for name, weight in one.get("candidates") or () if number(weight) is not None]
    notes = [f"{len(pairs) - _MOST_CANDIDATES} more"] if len(pairs) > _MOST_CANDIDATES else []
    if number(one.get("sigma")) is not None:
        notes.append(f"noise σ = {format_number(one['sigma'], 4)}")
    mixture = [
        [token(name), format_number(weight, 3), round(min(max(weight, 0.0), 1.0), 3)]
        for name, weight in pairs[:_MOST_CANDIDATES]
    ]
    tip = {"title": token(raw) or "part of a character", "mixture": mixture, "notes": [*notes, *more]}
    return {"text": text.removesuffix("\n") or "…", "tail": text.endswith("\n"), "tip": tip}


def groups(runs: Sequence[Mapping[str, Any]], series: Mapping[str, Series]) -> dict[str, Any] | None:
    """The steps that were kept by the first run of each strategy that kept any; None where no run did.

    Returns:
        ``runs``: name, series, seed and steps; ``left_out``: the number of kept steps beyond the page's limit.
    """
    having: dict[str, Mapping[str, Any]] = {}
    for run in runs:
        if rows(run, "groups"):
            having.setdefault(str(run.get("strategy")), run)
    if not having:
        return None
    entries, left_out = [], 0
    for name, run in having.items():
        lines = [line for line in rows(run, "groups") if rows(line, "groups")]
        placed = fitting(lines, MOST_BYTES // len(having))
        left_out += len(lines) - len(placed)
        steps = [_step(line) for line in placed]
        entries.append({"name": name, "series": series.get(name), "seed": run.get("seed"), "steps": steps})
    return {"runs": entries, "left_out": left_out}


def fitting(lines: Sequence[Mapping[str, Any]], room: int) -> list[Mapping[str, Any]]:
    """The kept steps of a run that fit into ``room`` bytes of JSON: evenly spread, with the first and the last."""
    sizes = [len(json.dumps(line, default=str)) for line in lines]
    for count in range(len(lines), 0, -1):
        at = sorted({round(i * (len(lines) - 1) / max(count - 1, 1)) for i in range(count)})
        if sum(sizes[i] for i in at) <= room:
            return [lines[i] for i in at]
    return []


def _step(line: Mapping[str, Any]) -> dict[str, Any]:
    rewards = [value for each in rows(line, "rewards") if (value := number(each)) is not None]
    edges = [(value, value) for value in sorted(set(rewards))]  # the lowest and the highest reward of each bar
    if len(edges) > _MOST_BARS:
        low, width = min(rewards), (max(rewards) - min(rewards)) / _MOST_BARS
        edges = [(low + i * width, low + (i + 1) * width) for i in range(_MOST_BARS)]
    begins = [low for low, _ in edges]

    def bar(reward: float | None) -> int | None:
        """The last bar that begins at or below a reward."""
        return None if reward is None or not begins else max(bisect_right(begins, reward) - 1, 0)

    groups: list[dict[str, Any]] = []
    for group in rows(line, "groups"):
        prompt = group.get("prompt")
        answers = [{**_answer(one), "bar": bar(number(one, "reward"))} for one in rows(group, "answers")]
        diversity = {key: number(group, "diversity", key) for key in ("different", "distinct_2", "common_prefix")}
        groups.append({"short": shortened(shown(prompt)), "prompt": prompt, "answers": answers, **diversity})
    counts = Counter(map(bar, rewards))
    held = Counter(answer["bar"] for group in groups for answer in group["answers"])
    bars = [
        {
            "label": " to ".join(dict.fromkeys(format_number(end, 2) for end in edge)),
            "count": counts[i],
            "share": round(100 * counts[i] / max(counts.values())),
            "held": held[i],
        }
        for i, edge in enumerate(edges)
    ]
    mean = format_number(sum(rewards) / len(rewards) if rewards else None)
    return {"step": line.get("step"), "answers": len(rewards), "mean": mean, "bars": bars, "groups": groups}


def _answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    texts, fed = rows(answer, "tokens"), dict(rows(answer, "fed"))
    notes: list[list[str]] = [[] for _ in texts]
    for lines, gap in zip(notes, rows(answer, "gaps")):
        lines += [] if number(gap) is None else [f"gap {gap:.2g}"]
    for lines, advantage in zip(notes, rows(answer, "advantages")):
        lines += [] if number(advantage) is None else [f"advantage {format_number(advantage, 2, sign=True)}"]
    tokens = [
        _marked({"text": text, "perturbed": i in fed, **fed.get(i, {})}, notes[i]) for i, text in enumerate(texts)
    ]
    reward, advantage = format_number(answer.get("reward"), 2), format_number(answer.get("advantage"), 2, sign=True)
    facts = [f"reward {reward}", f"advantage {advantage}"]
    facts.append(f"{len(fed)} of {plural(len(texts), 'token')} perturbed" if fed else plural(len(texts), "token"))
    cut = None if answer.get("cut") is None else plural(answer["cut"], "more token")
    return {"facts": " · ".join(facts), "tokens": tokens, "notes": notes if any(notes) else None, "cut": cut}
