"""Sample answers side by side, perturbed positions marked, their neighbor sets in reach of pointer and keyboard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ngrpo.report.marks import Series
from ngrpo.report.values import escape, figure, number, plural, rows, token

_MOST_CANDIDATES = 12


def samples(diagnosis: Mapping[str, Any], series: Mapping[str, Series]) -> str:
    """One block per problem, the first open: question, reference, and each strategy's answer in a column."""
    blocks = []
    for count, sample in enumerate(rows(diagnosis, "samples")):
        columns = "".join(_answer(answer, series) for answer in rows(sample, "by_strategy"))
        question = " ".join(str(sample.get("problem") or "").split())
        short = question if len(question) <= 110 else question[:109] + "…"
        opened = " open" if count == 0 else ""
        blocks.append(
            f'<details class="problem"{opened}><summary>Problem {count + 1}'
            f'<bdi class="short">{escape(short)}</bdi></summary>'
            f'<p class="question" dir="auto">{escape(sample.get("problem"))}</p>'
            f'<p class="reference">Reference answer: <b><bdi>{escape(sample.get("answer"))}</bdi></b></p>'
            f'<div class="answers">{columns}</div></details>'
        )
    if not blocks:
        return ""
    how = (
        "Marked tokens were perturbed: what the model was fed there is a mixture. Point at one, tap it, or reach it "
        "with Tab and the arrow keys to see the mixture’s tokens and weights. ⏎ is a new line."
    )
    return f'<p class="note">{how}</p>{"".join(blocks)}'


def _answer(answer: Mapping[str, Any], series: Mapping[str, Series]) -> str:
    name = str(answer.get("strategy"))
    found = rows(answer, "tokens")
    changed = sum(bool(one.get("perturbed")) for one in found)
    swatch = series[name].swatch() if name in series else ""
    facts = f"reward {figure(answer.get('reward'), 2)} · {changed} of {plural(len(found), 'token')} perturbed"
    text = "".join(_token(one) for one in found)
    # Nothing but the tokens inside the last element: white space shows there.
    return (
        f'<div class="answer"><p class="who">{swatch}<b><bdi>{escape(name)}</bdi></b></p><p class="sub">{facts}</p>'
        f'<div class="tokens" dir="auto" tabindex="0" role="region" aria-label="Answer of {escape(name)}">'
        f"{text or escape(None)}</div></div>"
    )


def _token(one: Mapping[str, Any]) -> str:
    raw = str(one.get("text") or "")
    shown = escape(raw.replace("\n", "⏎\n").replace("\t", "⇥\t")) if raw else ""
    if not one.get("perturbed"):
        return shown
    mixture = one.get("candidates")
    pairs = [
        [token(pair[0]), weight]
        for pair in (mixture if isinstance(mixture, list) else [])
        if isinstance(pair, list | tuple) and len(pair) == 2 and (weight := number(pair[1])) is not None
    ]
    sigma = number(one.get("sigma"))
    tip = {
        "title": token(raw) or "part of a character",
        "mixture": [[text, figure(weight, 3), round(min(max(weight, 0.0), 1.0), 3)] for text, weight in pairs],
        "notes": ([f"{len(pairs) - _MOST_CANDIDATES} more"] if len(pairs) > _MOST_CANDIDATES else [])
        + ([f"noise σ = {figure(sigma, 4)}"] if sigma is not None else []),
    }
    tip["mixture"] = tip["mixture"][:_MOST_CANDIDATES]
    data = escape(json.dumps(tip, ensure_ascii=False))
    # The break after ⏎ stays outside the mark, whose box would else run over two lines.
    tail = "\n" if shown.endswith("\n") else ""
    return f'<mark class="tok" tabindex="0" data-tip="{data}">{shown.removesuffix(tail) or "…"}</mark>{tail}'
