# SPDX-License-Identifier: Apache-2.0
"""``tests/data/scorer_pairs.jsonl``: pairs of reference and response with a person's verdict.

They were written before the scorers that they judge. ``kind`` is the kind of response. ``source`` is the kind's origin:
"report" (public reports of wrong verdicts of graders), "layout" (a benchmark's or a chat model's layout of answers),
"own" (thought up).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Pair(NamedTuple):
    """A reference, a response and whether the response is right; options only for multiple choice."""

    kind: str
    source: str
    gold: str
    response: str
    right: bool
    options: Sequence[str] = ()


_FILE = Path(__file__).parents[1] / "data" / "scorer_pairs.jsonl"
_PAIRS = [Pair(**json.loads(line)) for line in _FILE.read_text(encoding="utf-8").split("\n") if line]
MATH, CHOICE = ([pair for pair in _PAIRS if bool(pair.options) is choice] for choice in (False, True))
