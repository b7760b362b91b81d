# SPDX-License-Identifier: Apache-2.0
"""Rows of data files and the labels in them, value by value."""

import math
from pathlib import Path

import pytest

from ngrpo.machine.storage.datafiles import is_nothing, label_of, read_rows
from perturbations.errors import UsageError


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (None, ""),
        (math.nan, ""),  # what a table of pandas has in an empty place
        (7.0, "7"),
        (7.5, "7.5"),
        (12345678901234567890, "12345678901234567890"),
        (True, "True"),
        ("007", "007"),
        (["007", 8], ["007", 8]),
    ],
)
def test_labels(value: object, label: object) -> None:
    assert label_of(value) == label
    assert is_nothing(value) is (label == "")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_key_that_is_given_twice_is_refused(tmp_path: Path, name: str) -> None:
    row = '{"input": "Q", "label": "1", "label": "2"}'
    (tmp_path / name).write_text(f"[{row}]" if name.endswith(".json") else f"{row}\n")
    with pytest.raises(UsageError, match="of the keys input, label, label one is given twice"):
        read_rows("--data", str(tmp_path / name))


def test_excel_begins_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"\xef\xbb\xbfinput,label\nQ,007\n")
    assert read_rows("--data", str(tmp_path / "rows.csv")) == [{"input": "Q", "label": "007"}]
