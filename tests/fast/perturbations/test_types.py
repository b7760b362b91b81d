# SPDX-License-Identifier: Apache-2.0
"""Types: the shapes of annotations are checked in the tests, and how much of the packages has no type is limited."""

import re
from pathlib import Path

import pytest
import torch

from perturbations.edit import InputEdit
from tests.support.shapes import WrongShape

ROOT = Path(__file__).resolve().parents[3]
# What is left is mostly JSON, and what is passed on to upstream's functions as it came.
MOST_ANNOTATIONS = 80  # of `: Any`
MOST_WORDS = 880  # `Any` at all


def source_texts() -> list[str]:
    """The sources of both packages, without verl's folder: verl is not there where types are checked."""
    texts = []
    for package in ("perturbations", "ngrpo"):
        for path in (ROOT / package).rglob("*.py"):
            if path.parent.name != "verl":
                texts.append(path.read_text(encoding="utf-8"))
    return texts


def test_few_values_have_no_type() -> None:
    texts = source_texts()
    annotations = sum(text.count(": Any") for text in texts)
    words = sum(len(re.findall(r"\bAny\b", text)) for text in texts)
    assert 0 < annotations <= MOST_ANNOTATIONS
    assert words <= MOST_WORDS


def test_an_edit_of_two_sizes_is_seen() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    weights = torch.full((2, 3), 1 / 3)
    InputEdit(ids, weights, sigma=torch.zeros(2))
    with pytest.raises(WrongShape, match=r"sigma is torch\.float32 \(3,\)"):
        InputEdit(ids, weights, sigma=torch.zeros(3))


def test_ids_of_another_dtype_are_seen() -> None:
    weights = torch.full((2, 3), 1 / 3)
    with pytest.raises(WrongShape, match=r"ids is torch\.int32"):
        InputEdit(torch.zeros(2, 3, dtype=torch.int32), weights)
