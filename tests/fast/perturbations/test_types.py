# SPDX-License-Identifier: Apache-2.0
"""Types: the shapes of annotations are checked in the tests, and how much of the packages has no type is limited."""

import re
from pathlib import Path

import pytest
import torch

from perturbations.edit import InputEdit
from tests.support.shapes import WrongShape

ROOT = Path(__file__).resolve().parents[3]
# `: Any`, and the word at all. What is left is mostly JSON, and what is passed on to upstream's functions as it came.
ANNOTATED, ANYWHERE = 80, 880


def test_few_values_have_no_type() -> None:
    """Without verl's room: verl is not there where types are checked."""
    files = [path for package in ("perturbations", "ngrpo") for path in (ROOT / package).rglob("*.py")]
    files = [path for path in files if path.parent.name != "verl"]
    texts = [path.read_text(encoding="utf-8") for path in files]
    assert sum(text.count(": Any") for text in texts) <= ANNOTATED
    assert sum(len(re.findall(r"\bAny\b", text)) for text in texts) <= ANYWHERE


def test_an_edit_of_two_sizes_is_seen() -> None:
    ids, weights = torch.zeros(2, 3, dtype=torch.int64), torch.full((2, 3), 1 / 3)
    InputEdit(ids, weights, torch.zeros(2))
    with pytest.raises(WrongShape, match=r"sigma is torch\.float32 \(3,\)"):
        InputEdit(ids, weights, torch.zeros(3))
    with pytest.raises(WrongShape, match=r"ids is torch\.int32"):
        InputEdit(ids.int(), weights)
