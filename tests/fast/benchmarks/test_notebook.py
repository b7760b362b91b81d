# SPDX-License-Identifier: Apache-2.0
"""The committed outputs of examples/explore.ipynb: of one run from top to bottom, without errors and without noise."""

import json
import re
from typing import Any

import pytest

from tests.conftest import ROOT

WRITTEN_AGAIN_BY = "run: make notebook"


@pytest.fixture(scope="module")
def code_cells() -> list[dict[str, Any]]:
    notebook = json.loads((ROOT / "examples" / "explore.ipynb").read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed_by(cell: dict[str, Any]) -> str:
    """The text of a cell's standard output."""
    streams = [output for output in cell["outputs"] if output["output_type"] == "stream"]
    assert all(stream["name"] == "stdout" for stream in streams)
    return "".join("".join(stream["text"]) for stream in streams)


def test_a_cell_has_the_outputs_that_its_source_makes(code_cells: list[dict[str, Any]]) -> None:
    for number, cell in enumerate(code_cells, start=1):
        source = "".join(cell["source"])
        assert cell["execution_count"] == number, WRITTEN_AGAIN_BY
        assert bool(printed_by(cell)) == ("print(" in source), WRITTEN_AGAIN_BY
        pictures = [output for output in cell["outputs"] if output["output_type"] == "display_data"]
        assert bool(pictures) == ("pyplot.show()" in source), WRITTEN_AGAIN_BY


def test_the_outputs_show_an_exact_replay(code_cells: list[dict[str, Any]]) -> None:
    last = printed_by(code_cells[-1])
    differences = re.fullmatch(r"largest \|Δ log p\|: (\S+) with the replay, (\S+) without\n", last)
    assert differences is not None, last
    replayed, unreplayed = (float(difference) for difference in differences.groups())
    assert replayed < 1e-4 < 1e-2 < unreplayed
