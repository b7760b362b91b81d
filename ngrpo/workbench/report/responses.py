# SPDX-License-Identifier: Apache-2.0
"""Responses side by side, perturbed positions marked: samples of a diagnosis, and the groups that a run kept."""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ngrpo.workbench.report.drawing import Series
from ngrpo.workbench.report.values import format_number, number, plural, rows, shortened, shown, token, told_apart

MOST_BYTES = 1_500_000
"""The room for all kept groups of a page, as JSON; the page names the number of steps left out."""
_MOST_CANDIDATES = 12
_MOST_BARS = 10


def samples(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any] | None:
    """One block per problem: question, reference, and each arm's response in a column."""
    problems: list[dict[str, Any]] = []
    for sample in rows(diagnosis, "samples"):
        answers = []
        for response in rows(sample, "by_strategy"):
            name = str(response.get("strategy"))
            tokens = rows(response, "tokens")
            perturbed = sum(bool(token_row.get("perturbed")) for token_row in tokens)
            reward = format_number(response.get("reward"), 2)
            answers.append(
                {
                    "name": name,
                    "series": series.get(name),
                    "facts": f"reward {reward} · {perturbed} of {plural(len(tokens), 'token')} perturbed",
                    "tokens": [_marked(token_row) for token_row in tokens],
                }
            )
        problems.append({**sample, "short": shortened(sample.get("problem") or ""), "answers": answers})
    return {"problems": problems} if problems else None


def _marked(token_row: Mapping[str, Any], notes: Sequence[str] = ()) -> dict[str, Any]:
    """A token's text; for a perturbed one its tooltip, which ends in ``notes``, and whether a line ends after it."""
    raw = str(token_row.get("text") or "")
    text = raw.replace("\n", "⏎\n").replace("\t", "⇥\t")
    if not token_row.get("perturbed"):
        return {"text": text}
    candidates = []
    for name, weight in token_row.get("candidates") or ():
        if number(weight) is not None:
            candidates.append((name, weight))
    mixture = []
    for name, weight in candidates[:_MOST_CANDIDATES]:
        bar_length = round(min(max(weight, 0.0), 1.0), 3)
        mixture.append([token(name), format_number(weight, 3), bar_length])
    facts = []
    if len(candidates) > _MOST_CANDIDATES:
        facts.append(f"{len(candidates) - _MOST_CANDIDATES} more")
    if number(token_row.get("sigma")) is not None:
        facts.append(f"noise σ = {format_number(token_row['sigma'], 4)}")
    tip = {"title": token(raw) or "part of a character", "mixture": mixture, "notes": [*facts, *notes]}
    return {"text": text.removesuffix("\n") or "…", "tail": text.endswith("\n"), "tip": tip}


def groups(runs: Sequence[Mapping[str, Any]], series: Mapping[str, Series]) -> dict[str, Any] | None:
    """The steps that were kept by the first run of each arm that kept any; None where no run did.

    Returns:
        ``runs``: name, series, seed and steps; ``left_out``: the number of kept steps beyond the page's limit.
    """
    first_runs: dict[str, Mapping[str, Any]] = {}
    for run in runs:
        if rows(run, "groups"):
            first_runs.setdefault(str(run.get("strategy")), run)
    if not first_runs:
        return None
    entries = []
    left_out = 0
    for name, run in first_runs.items():
        kept_steps = [step for step in rows(run, "groups") if rows(step, "groups")]
        shown_steps = fitting(kept_steps, MOST_BYTES // len(first_runs))
        left_out += len(kept_steps) - len(shown_steps) + int(number(run, "groups_left_out") or 0)
        steps = [_step(step) for step in shown_steps]
        entries.append({"name": name, "series": series.get(name), "seed": run.get("seed"), "steps": steps})
    return {"runs": entries, "left_out": left_out}


def fitting(lines: Sequence[Mapping[str, Any]], room: int) -> list[Mapping[str, Any]]:
    """The kept steps of a run that fit into ``room`` bytes of JSON: evenly spread, with the first and the last."""
    sizes = [len(json.dumps(line, default=str)) for line in lines]
    for count in range(len(lines), 0, -1):
        spacing = (len(lines) - 1) / max(count - 1, 1)
        indices = sorted({round(number * spacing) for number in range(count)})
        if sum(sizes[index] for index in indices) <= room:
            return [lines[index] for index in indices]
    return []


class _Bars:
    """The histogram of a step's rewards: a bar for each reward, or ten of equal width where there are more."""

    def __init__(self, rewards: Sequence[float]) -> None:
        different = sorted(set(rewards))
        if len(different) > _MOST_BARS:
            low = different[0]
            width = (different[-1] - low) / _MOST_BARS
            self.edges = [(low + bar * width, low + (bar + 1) * width) for bar in range(_MOST_BARS)]
        else:
            self.edges = [(reward, reward) for reward in different]
        self._begins = [low for low, _ in self.edges]

    def bar_of(self, reward: float | None) -> int | None:
        """The number of the last bar that begins at or below a reward."""
        if reward is None or not self._begins:
            return None
        return max(bisect_right(self._begins, reward) - 1, 0)


def _step(line: Mapping[str, Any]) -> dict[str, Any]:
    """A kept step for templates/groups.html: its groups, and the histogram of the rewards of all its responses."""
    logged_rewards = map(number, rows(line, "rewards"))
    rewards = [reward for reward in logged_rewards if reward is not None]
    bars = _Bars(rewards)
    groups: list[dict[str, Any]] = []
    for group in rows(line, "groups"):
        answers = []
        for response in rows(group, "answers"):
            answers.append({**_answer(response), "bar": bars.bar_of(number(response, "reward"))})
        groups.append(
            {
                "short": shortened(shown(group.get("prompt"))),
                "prompt": group.get("prompt"),
                "answers": answers,
                "different": number(group, "diversity", "different"),
                "distinct_2": number(group, "diversity", "distinct_2"),
                "common_prefix": number(group, "diversity", "common_prefix"),
            }
        )
    return {
        "step": line.get("step"),
        "answers": len(rewards),
        "mean": format_number(sum(rewards) / len(rewards) if rewards else None),
        "bars": _bar_rows(bars, rewards, groups),
        "groups": groups,
    }


def _bar_rows(bars: _Bars, rewards: Sequence[float], groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each bar its label, count, height in percent of the highest, and how many of its responses are kept."""
    all_edges = list(dict.fromkeys(edge for edges in bars.edges for edge in edges))
    labels = told_apart(lambda decimals: [format_number(edge, decimals) for edge in all_edges], (2, 3, 4))
    label_of_edge = dict(zip(all_edges, labels))
    counts = Counter(map(bars.bar_of, rewards))
    kept_counts = Counter(answer["bar"] for group in groups for answer in group["answers"])
    bar_rows = []
    for bar, edges in enumerate(bars.edges):
        bar_rows.append(
            {
                "label": " to ".join(dict.fromkeys(label_of_edge[edge] for edge in edges)),
                "count": counts[bar],
                "share": round(100 * counts[bar] / max(counts.values())),
                "held": kept_counts[bar],
            }
        )
    return bar_rows


def _answer(response: Mapping[str, Any]) -> dict[str, Any]:
    """A kept response for templates/groups.html."""
    texts = rows(response, "tokens")
    fed = dict(rows(response, "fed"))
    notes: list[list[str]] = [[] for _ in texts]
    for lines, mismatch in zip(notes, rows(response, "gaps")):
        if number(mismatch) is not None:
            lines.append(f"mismatch {mismatch:.2g}")
    for lines, advantage in zip(notes, rows(response, "advantages")):
        if number(advantage) is not None:
            lines.append(f"advantage {format_number(advantage, 2, sign=True)}")
    tokens = []
    for index, text in enumerate(texts):
        token_row = {"text": text, "perturbed": index in fed, **fed.get(index, {})}
        tokens.append(_marked(token_row, notes[index]))
    facts = [
        f"reward {format_number(response.get('reward'), 2)}",
        f"advantage {format_number(response.get('advantage'), 2, sign=True)}",
        f"{len(fed)} of {plural(len(texts), 'token')} perturbed" if fed else plural(len(texts), "token"),
    ]
    cut = response.get("cut")
    return {
        "facts": " · ".join(facts),
        "tokens": tokens,
        "notes": notes if any(notes) else None,
        "cut": None if cut is None else plural(cut, "more token"),
    }
