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
MATH = [pair for pair in _PAIRS if not pair.options]
CHOICE = [pair for pair in _PAIRS if pair.options]

_CASES = _rows("scorer_cases.jsonl")
MATH_CASES = [row for row in _CASES if "gold" in row]
"""Cases with gold, response and right."""
LETTER_CASES = [row for row in _CASES if "letter" in row]
"""Cases with a response and the letter of four gases."""
FORMS = [row for row in _CASES if "forms" in row]
"""Cases whose forms are equal."""
