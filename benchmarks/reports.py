# SPDX-License-Identifier: Apache-2.0
"""The committed pages that follow from docs/results/: reports, the gallery's charts, and the picture of a report.

python -m benchmarks.reports            # all; the picture only where there is a Chromium
python -m benchmarks.reports --no-picture

A report is a function of its results: tests/fast/benchmarks/test_reports.py fails where a committed one is another.
"""

import argparse
import gzip
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import gallery
from ngrpo.workbench.compare import results, summaries
from ngrpo.workbench.evaluate.evaluation import unscored
from ngrpo.workbench.report import write_report

DOCS = Path(__file__).resolve().parents[1] / "docs"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_SHOWN = DOCS / "results" / "sums" / "report.html"  # the report of docs/compare.png
_WINDOW = "1180,1960"


def packed_results() -> list[Path]:
    """The committed results; the report of each is beside it."""
    return sorted((DOCS / "results").rglob("results.json.gz"))


def write(packed: Path, page: Path) -> None:
    """Writes the report of committed results."""
    write_report(with_unscored(json.loads(gzip.decompress(packed.read_bytes()))), page)


def with_unscored(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """A results.json whose shares of unscored responses, and whose warnings, are those of its runs.

    Results of release 0.1.0 have neither, although their evaluations hold the shares. Of parts that were joined, each
    had its own warnings.
    """
    untrained = comparison["untrained"]
    summary = []
    for row in comparison["summary"]:
        runs = [run for run in comparison["runs"] if run["strategy"] == row["strategy"]]
        summary.append({**row, "unscored": summaries.mean_unscored(runs)})
    complete = {
        **comparison,
        "summary": summary,
        "untrained": untrained and {**untrained, "unscored": unscored(untrained)},
    }
    return {**complete, "warnings": results.warnings_of(complete)}


def browser() -> str | None:
    """The path of this machine's Chromium: the environment's CHROMIUM, or the first of the usual names."""
    for name in (os.environ.get("CHROMIUM", ""), *_BROWSERS):
        path = shutil.which(name)
        if path is not None:
            return path
    return None


def photograph(page: Path, picture: Path) -> bool:
    """Makes a picture of a page's head; False where this machine has no browser."""
    program = browser()
    if program is None:
        return False
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                program,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--window-size={_WINDOW}",
                f"--screenshot={picture}",
                page.as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )
    return True


def main() -> None:
    """Writes everything, and prints each path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-picture", action="store_true", help="leave docs/compare.png as it is")
    options = parser.parse_args()
    for packed in packed_results():
        page = packed.with_name("report.html")
        write(packed, page)
        print(page)
    gallery.main([])
    if options.no_picture:
        return
    picture = DOCS / "compare.png"
    if photograph(_SHOWN, picture):
        print(picture)
    else:
        print(f"{picture} stays as it was: there is no Chromium (make browser)")


if __name__ == "__main__":
    main()
