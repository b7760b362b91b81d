# SPDX-License-Identifier: Apache-2.0
"""The committed reports are those that the code of today makes of the committed results, byte for byte."""

from pathlib import Path

import pytest

from benchmarks import reports

PACKED = reports.packed_results()


def test_all_of_them_are_looked_at() -> None:
    assert {packed.with_name("report.html") for packed in PACKED} == set((reports.DOCS / "results").rglob("*.html"))


@pytest.mark.parametrize("packed", PACKED, ids=lambda path: str(path.parent.relative_to(reports.DOCS / "results")))
def test_a_committed_report_is_what_the_code_makes(packed: Path, tmp_path: Path) -> None:
    reports.write(packed, tmp_path / "report.html")
    committed = packed.with_name("report.html").read_bytes()
    assert (tmp_path / "report.html").read_bytes() == committed, "run: python -m benchmarks.reports"
