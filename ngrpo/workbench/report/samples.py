# SPDX-License-Identifier: Apache-2.0
"""Sample answers side by side, perturbed positions marked, their neighbor sets in reach of pointer and keyboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ngrpo.workbench.report.marks import Series
from ngrpo.workbench.report.values import figure, number, plural, rows, token

_MOST_CANDIDATES = 12


def samples(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any] | None:
    """One block per problem: question, reference, and each strategy's answer in a column."""
    problems = []
    for sample in rows(diagnosis, "samples"):
        question = " ".join(str(sample.get("problem") or "").split())
        problems.append(
            {
                "short": question if len(question) <= 110 else question[:109] + "…",
                "question": sample.get("problem"),
                "answer": sample.get("answer"),
                "answers": [_answer(answer, series) for answer in rows(sample, "by_strategy")],
            }
        )
    return {"problems": problems} if problems else None


def _answer(answer: Mapping[str, Any], series: Mapping[str, Series]) -> dict[str, Any]:
    name, tokens = str(answer.get("strategy")), rows(answer, "tokens")
    changed = sum(bool(one.get("perturbed")) for one in tokens)
    facts = f"reward {figure(answer.get('reward'), 2)} · {changed} of {plural(len(tokens), 'token')} perturbed"
    return {"name": name, "series": series.get(name), "facts": facts, "tokens": [marked(one) for one in tokens]}


def marked(one: Mapping[str, Any], more: Sequence[str] = ()) -> dict[str, Any]:
    """The token's text; of a perturbed one what the tooltip says, and whether a line ends after it.

    Args:
        one: ``text``, ``perturbed``, ``candidates`` and ``sigma``.
        more: further lines of the tooltip.
    """
    raw = str(one.get("text") or "")
    text = raw.replace("\n", "⏎\n").replace("\t", "⇥\t")
    if not one.get("perturbed"):
        return {"text": text}
    mixture = one.get("candidates")
    pairs = [
        (token(pair[0]), weight)
        for pair in (mixture if isinstance(mixture, list) else [])
        if isinstance(pair, list | tuple) and len(pair) == 2 and (weight := number(pair[1])) is not None
    ]
    sigma = number(one.get("sigma"))
    notes = [f"{len(pairs) - _MOST_CANDIDATES} more"] if len(pairs) > _MOST_CANDIDATES else []
    tip = {
        "title": token(raw) or "part of a character",
        "mixture": [
            [text, figure(weight, 3), round(min(max(weight, 0.0), 1.0), 3)] for text, weight in pairs[:_MOST_CANDIDATES]
        ],
        "notes": [*notes, *([f"noise σ = {figure(sigma, 4)}"] if sigma is not None else []), *more],
    }
    return {"text": text.removesuffix("\n") or "…", "tail": text.endswith("\n"), "tip": tip}
