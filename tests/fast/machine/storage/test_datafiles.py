# SPDX-License-Identifier: Apache-2.0
"""Rows of data files and the labels in them, value by value."""

import math
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from ngrpo.machine.storage.datafiles import contents, is_nothing, label_of, read_rows, read_yaml
from perturbations.errors import UsageError


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (None, ""),
        (math.nan, ""),  # what a table of pandas has in an empty place
        (7.0, "7"),
        (7.5, "7.5"),
        (-0.0, "0"),
        (6.02e23, "602000000000000000000000"),  # and not the 601999999999999995805696 of the float
        (1e-7, "0.0000001"),
        (b"7", "7"),
        (12345678901234567890, "12345678901234567890"),
        (True, "True"),
        ("007", "007"),
        (["007", 8], ["007", 8]),
    ],
)
def test_labels(value: object, label: object) -> None:
    assert label_of(value) == label
    assert is_nothing(value) is (label == "")


def test_bytes_that_are_no_text_are_no_label() -> None:
    with pytest.raises(UsageError, match=r"the label b'\\xff' is bytes and no text"):
        label_of(b"\xff")


@pytest.mark.parametrize(
    ("number", "label"),
    [
        ("0.1", "0.1"),
        ("0.10000000000000001", "0.1"),  # a float of 17 digits, as C prints it
        ("3.14159265358979323846", "3.14159265358979323846"),
        ("1e400", "1e400"),
        ("1e-400", "1e-400"),
    ],
)
def test_a_decimal_that_no_float_holds_stays_as_it_is_written(tmp_path: Path, number: str, label: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"label": {number}}}\n')
    (row,) = read_rows("--data", str(tmp_path / "rows.jsonl"))
    assert label_of(row["label"]) == label


@pytest.mark.parametrize("width", [np.float16, np.float32])
def test_floats_of_a_parquet_file_have_their_shortest_digits(tmp_path: Path, width: type) -> None:
    labels = pyarrow.array([width(0.1), width(3.25), None], pyarrow.from_numpy_dtype(width))
    table = pyarrow.table({"input": ["Q", "Q", "Q"], "label": labels})
    parquet.write_table(table, tmp_path / "rows.parquet")
    rows = read_rows("--data", str(tmp_path / "rows.parquet"))
    assert [label_of(row["label"]) for row in rows] == ["0.1", "3.25", ""]


def test_floats_within_a_column_have_their_shortest_digits_too(tmp_path: Path) -> None:
    """verl has its references in a column of objects."""
    inner = pyarrow.struct([("ground_truth", pyarrow.float32()), ("others", pyarrow.list_(pyarrow.float32()))])
    column = pyarrow.array([{"ground_truth": 0.1, "others": [0.2, None]}, None], inner)
    parquet.write_table(pyarrow.table({"reward_model": column}), tmp_path / "rows.parquet")
    rows = read_rows("--data", str(tmp_path / "rows.parquet"))
    assert [row["reward_model"] for row in rows] == [{"ground_truth": 0.1, "others": [0.2, None]}, None]


@pytest.mark.parametrize(
    ("text", "label"), [("70.00", "70"), ("1.000E-7", "0.0000001"), ("-0.00", "0"), ("1E+3", "1000")]
)
def test_a_decimal_is_its_shortest_text(text: str, label: str) -> None:
    assert label_of(Decimal(text)) == label


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("input,label,label\nQ,1,2\n")
    table = pyarrow.Table.from_arrays([["Q"], ["1"], ["2"]], ["input", "label", "label"])
    parquet.write_table(table, tmp_path / "rows.parquet")
    for name in ("rows.csv", "rows.parquet"):
        with pytest.raises(UsageError, match="the column 'label' is there twice"):
            read_rows("--data", str(tmp_path / name))


def test_columns_without_a_name_may_be_several(tmp_path: Path) -> None:
    """A spreadsheet with empty columns."""
    (tmp_path / "rows.csv").write_text("input,label,,\nQ,7,,\n")
    assert read_rows("--data", str(tmp_path / "rows.csv"))[0]["label"] == "7"


def test_a_quote_that_is_never_closed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('input,label\n"Q,1\nR,2\n')
    with pytest.raises(UsageError, match=r"the row after line 1: unexpected end of data\. Close every quote"):
        read_rows("--data", str(tmp_path / "rows.csv"))


def test_a_long_cell_of_a_csv_file_is_read(tmp_path: Path) -> None:
    """Python's own limit is 131,072 characters."""
    (tmp_path / "rows.csv").write_text(f"input,label\n{'x' * 200_000},7\n")
    assert len(read_rows("--data", str(tmp_path / "rows.csv"))[0]["input"]) == 200_000


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(UsageError, match=r"line 1 is not JSON \(its lists or objects are nested too deeply\)"):
        read_rows("--data", str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_key_that_is_given_twice_is_refused(tmp_path: Path, name: str) -> None:
    row = '{"input": "Q", "label": "1", "label": "2"}'
    (tmp_path / name).write_text(f"[{row}]" if name.endswith(".json") else f"{row}\n")
    with pytest.raises(UsageError, match="of the keys input, label, label one is given twice"):
        read_rows("--data", str(tmp_path / name))


def test_excel_begins_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"\xef\xbb\xbfinput,label\nQ,007\n")
    assert read_rows("--data", str(tmp_path / "rows.csv")) == [{"input": "Q", "label": "007"}]


def test_a_number_in_yaml_stays_as_it_is_written(tmp_path: Path) -> None:
    """YAML 1.1 reads these as 8, 90, 20240101 and 16."""
    path = tmp_path / "a.yaml"
    path.write_text("seeds: 010\nbatch: 1:30\nout: 2024_01_01\nsteps: 0x10\nn: 12\nlist: [0, -3, 0b1]\n")
    values = read_yaml(str(path), flag="--config", example="a: 1")
    assert values == {
        "seeds": "010",
        "batch": "1:30",
        "out": "2024_01_01",
        "steps": "0x10",
        "n": 12,
        "list": [0, -3, "0b1"],
    }


# --- contents: what a run is recognised by ----------------------------------------------------------------------------


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_with_a_python_file_come_the_modules_and_packages_that_it_imports(tmp_path: Path) -> None:
    files = {
        "reward.py": "import torch\nimport near\nfrom helpers.judge import score\n",
        "near.py": "import further\n",
        "further.py": "",
        "helpers/__init__.py": "",
        "helpers/judge.py": "from . import words\n",
        "helpers/words.py": "",
        "unused.py": "",
    }
    write(tmp_path, files)
    named = {str(tmp_path / name) for name in files if name != "unused.py"}
    before = contents([str(tmp_path / "reward.py")])
    assert before.keys() == named
    (tmp_path / "helpers/words.py").write_text("RIGHT = 'right'\n")
    after = contents([str(tmp_path / "reward.py")])
    assert [name for name in named if before[name] != after[name]] == [str(tmp_path / "helpers/words.py")]


@pytest.mark.parametrize("mark", ["state.json", "dataset_dict.json"])
@pytest.mark.parametrize("part", ["", "@test"])
def test_a_saved_dataset_is_all_of_its_files(tmp_path: Path, mark: str, part: str) -> None:
    files = {mark: "{}", "test/data.arrow": "1"}
    write(tmp_path / "saved", files)
    write(tmp_path / "model", {"config.json": "{}"})
    found = contents([f"{tmp_path / 'saved'}{part}", str(tmp_path / "model")])
    assert found.keys() == {str(tmp_path / "saved" / name) for name in files}
