# SPDX-License-Identifier: Apache-2.0
"""The committed reports are those that the code of today makes of the committed results, byte for byte.

They show which responses say little, and the study's page says it too.
"""

import gzip
import json
import re
from pathlib import Path

import pytest

from benchmarks import reports
from ngrpo.workbench.report.values import shares

PACKED = reports.packed_results()


def test_all_of_them_are_looked_at() -> None:
    assert {packed.with_name("report.html") for packed in PACKED} == set((reports.DOCS / "results").rglob("*.html"))


@pytest.mark.parametrize("packed", PACKED, ids=lambda path: str(path.parent.relative_to(reports.DOCS / "results")))
def test_a_committed_report_is_what_the_code_makes(packed: Path, tmp_path: Path) -> None:
    reports.write(packed, tmp_path / "report.html")
    committed = packed.with_name("report.html").read_bytes()
    assert (tmp_path / "report.html").read_bytes() == committed, "run: python -m benchmarks.reports"


def test_results_of_the_first_release_show_their_unreadable_responses() -> None:
    packed = reports.DOCS / "results" / "basic" / "results.json.gz"
    published = json.loads(gzip.decompress(packed.read_bytes()))
    assert "unscored" not in published["summary"][0], "this release had none"
    shown = reports.with_unscored(published)
    assert shares(shown["summary"][0]["unscored"]) == "75% / 37% / –"
    assert "none: 37% of the responses have no readable answer" in shown["warnings"]


@pytest.mark.parametrize(
    ("results", "sentence", "shown"),
    [
        ("basic", r"On `basic` these are (\d+)% to (\d+)% of an arm's final responses", "unreadable"),
        ("basic", r"and (\d+)% to (\d+)% were cut at 12 tokens", "cut"),
        ("sums", r"On the sums (\d+)% to \d+% are unreadable.* and (\d+)% with `soft`", "unreadable"),
    ],
)
def test_the_first_study_says_how_many_responses_say_little(results: str, sentence: str, shown: str) -> None:
    packed = reports.DOCS / "results" / results / "results.json.gz"
    summary = reports.with_unscored(json.loads(gzip.decompress(packed.read_bytes())))["summary"]
    of_arms = [row["unscored"][shown] for row in summary]
    stated = re.search(sentence, (reports.DOCS / "studies" / "study.md").read_text(encoding="utf-8"))
    assert stated is not None
    assert [f"{share}%" for share in stated.groups()] == [f"{min(of_arms):.0%}", f"{max(of_arms):.0%}"]
