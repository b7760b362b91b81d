# SPDX-License-Identifier: Apache-2.0
"""A look into groups: all answers to a prompt side by side, and each kept step's rewards as bars that open answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ngrpo.workbench.report.marks import Series
from ngrpo.workbench.report.samples import marked
from ngrpo.workbench.report.values import dig, figure, number, plural, rows, shown, signed

MOST_BYTES = 1_500_000
"""Of all kept groups of a page, as JSON; what is beyond it is left out, and the page says so."""
_MOST_BARS = 10


def groups(runs: Sequence[Mapping[str, Any]], series: Mapping[str, Series]) -> dict[str, Any] | None:
    """The steps that runs have kept, under their strategy and seed.

    Args:
        runs: of a comparison, or one; of each strategy the first run that kept anything is shown.
        series: the look of each strategy.

    Returns:
        ``runs``: name, series, seed and steps; ``left_out``: how many kept steps there was no room for. None where no
        run kept anything.
    """
    having: dict[str, Mapping[str, Any]] = {}
    for run in runs:
        if rows(run, "groups"):
            having.setdefault(str(run.get("strategy")), run)
    if not having:
        return None
    room = MOST_BYTES // len(having)
    entries, left_out = [], 0
    for name, run in having.items():
        lines = [line for line in rows(run, "groups") if rows(line, "groups")]
        placed = fitting(lines, room)
        left_out += len(lines) - len(placed)
        steps = [_step(line) for line in placed]
        entries.append({"name": name, "series": series.get(name), "seed": run.get("seed"), "steps": steps})
    return {"runs": entries, "left_out": left_out}


def fitting(lines: Sequence[Mapping[str, Any]], room: int) -> list[Mapping[str, Any]]:
    """As many of the kept steps as there is room for, spread evenly, the first and the last among them.

    Args:
        lines: of a run.
        room: bytes of their JSON.
    """
    sizes = [len(json.dumps(line, default=str)) for line in lines]
    for count in range(len(lines), 0, -1):
        at = sorted({round(i * (len(lines) - 1) / max(count - 1, 1)) for i in range(count)})
        if sum(sizes[i] for i in at) <= room:
            return [lines[i] for i in at]
    return []


def _step(line: Mapping[str, Any]) -> dict[str, Any]:
    raw = line.get("rewards")
    rewards = [value for each in (raw if isinstance(raw, list) else []) if (value := number(each)) is not None]
    edges = _edges(rewards)
    group_rows = [_group(group, edges) for group in rows(line, "groups")]
    held = [answer["bar"] for group in group_rows for answer in group["answers"]]
    bars = []
    highest = max((sum(_bar(edges, r) == i for r in rewards) for i in range(len(edges))), default=0)
    for i, (low, high) in enumerate(edges):
        count = sum(_bar(edges, reward) == i for reward in rewards)
        bars.append(
            {
                "label": figure(low, 2) if low == high else f"{figure(low, 2)} to {figure(high, 2)}",
                "count": count,
                "share": round(100 * count / highest) if highest else 0,
                "held": held.count(i),
            }
        )
    mean = sum(rewards) / len(rewards) if rewards else None
    return {
        "step": line.get("step"),
        "answers": len(rewards),
        "mean": figure(mean),
        "bars": bars,
        "groups": group_rows,
    }


def _edges(rewards: Sequence[float]) -> list[tuple[float, float]]:
    """The lowest and the highest reward of each bar: one for each value, or ten of equal width."""
    values = sorted(set(rewards))
    if len(values) <= _MOST_BARS:
        return [(value, value) for value in values]
    low, width = values[0], (values[-1] - values[0]) / _MOST_BARS
    return [(low + i * width, low + (i + 1) * width) for i in range(_MOST_BARS)]


def _bar(edges: Sequence[tuple[float, float]], reward: float) -> int:
    """The bar of a reward; at an edge the higher one, but for the highest reward."""
    exact = next((i for i, (low, high) in enumerate(edges) if low == high == reward), None)
    if exact is not None:
        return exact
    return max((i for i, (low, _) in enumerate(edges) if low <= reward), default=0)


def _group(group: Mapping[str, Any], edges: Sequence[tuple[float, float]]) -> dict[str, Any]:
    prompt = " ".join(shown(group.get("prompt")).split())
    answers = [_answer(answer, i, edges) for i, answer in enumerate(rows(group, "answers"), start=1)]
    return {
        "short": prompt if len(prompt) <= 110 else prompt[:109] + "…",
        "prompt": group.get("prompt"),
        "told": _diversity(dig(group, "diversity"), len(answers)),
        "answers": answers,
    }


def _diversity(diversity: object, answers: int) -> str:
    different, distinct, common = (number(dig(diversity, key)) for key in ("different", "distinct_2", "common_prefix"))
    if different is None:
        return plural(answers, "answer")
    facts = [
        f"all {answers} answers are the same" if different == 1 < answers else f"{different:.0f} different answers"
    ]
    facts[0] += f" of {answers}" if not facts[0].startswith("all") else ""
    if distinct is not None:
        facts.append(f"distinct-2 {figure(distinct, 2)}")
    if common is not None and different != 1:
        facts.append(f"two answers part after {figure(common, 1)} tokens on average")
    return " · ".join(facts)


def _answer(answer: Mapping[str, Any], place: int, edges: Sequence[tuple[float, float]]) -> dict[str, Any]:
    raw = answer.get("tokens")
    texts = [str(text) for text in raw] if isinstance(raw, list) else []
    fed = {}
    pairs = answer.get("fed")
    for pair in pairs if isinstance(pairs, list) else []:
        if isinstance(pair, list) and len(pair) == 2 and number(pair[0]) is not None and isinstance(pair[1], Mapping):
            fed[int(pair[0])] = pair[1]
    gaps, advantages = (_aligned(answer.get(key), len(texts)) for key in ("gaps", "advantages"))
    tokens = [
        marked({"text": text, "perturbed": i in fed, **fed.get(i, {})}, _notes(i, gaps, advantages))
        for i, text in enumerate(texts)
    ]
    reward = number(answer.get("reward"))
    facts = [f"reward {figure(reward, 2)}", f"advantage {signed(answer.get('advantage'), 2)}"]
    facts.append(f"{len(fed)} of {plural(len(texts), 'token')} perturbed" if fed else plural(len(texts), "token"))
    cut = number(answer.get("cut"))
    return {
        "name": f"answer {place}",
        "facts": " · ".join(facts),
        "tokens": tokens,
        "notes": None
        if gaps is None and advantages is None
        else [_notes(i, gaps, advantages) for i in range(len(texts))],
        "cut": None if cut is None else plural(int(cut), "more token"),
        "bar": None if reward is None or not edges else _bar(edges, reward),
    }


def _aligned(values: object, count: int) -> list[Any] | None:
    return values if isinstance(values, list) and len(values) == count else None


def _notes(i: int, gaps: list[Any] | None, advantages: list[Any] | None) -> list[str]:
    """What is said of a token beside what was fed."""
    notes = []
    if gaps is not None and number(gaps[i]) is not None:
        notes.append(f"gap {gaps[i]:.2g}")
    if advantages is not None and number(advantages[i]) is not None:
        notes.append(f"advantage {signed(advantages[i], 2)}")
    return notes
