# SPDX-License-Identifier: Apache-2.0
"""``tests/data``: pairs of reference and response with a person's verdict, and further cases of the scorers.

The pairs were written before the scorers that they judge. ``kind`` is the kind of response, ``source`` its origin:
"report" (public reports of wrong verdicts of graders), "layout" (a benchmark's or a chat model's layout of answers),
"own" (thought up).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Pair(NamedTuple):
    """A reference, a response and whether the response is right; options only for multiple choice."""

    kind: str
    source: str
    gold: str
    response: str
    right: bool
    options: Sequence[str] = ()


def _rows(name: str) -> list[dict[str, Any]]:
    text = (Path(__file__).parents[1] / "data" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


_PAIRS = [Pair(**row) for row in _rows("scorer_pairs.jsonl")]
MATH, CHOICE = ([pair for pair in _PAIRS if bool(pair.options) is choice] for choice in (False, True))
# Math cases have gold, response and right; letter cases a response and the letter of four gases; forms are equal.
_KEYS = ("gold", "letter", "forms")
MATH_CASES, LETTER_CASES, FORMS = ([row for row in _rows("scorer_cases.jsonl") if key in row] for key in _KEYS)
