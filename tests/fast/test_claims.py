# SPDX-License-Identifier: Apache-2.0
"""`make test` runs a file for each claim, and `make test-more` all that is left."""

import subprocess
import sys

import pytest

from tests.claims import CLAIMS, files_of
from tests.conftest import ROOT


def collected(chosen: str, *folders: str) -> set[str]:
    """The files in which pytest finds such tests."""
    command = [sys.executable, "-m", "pytest", *folders, "--collect-only", "-qq", "-m", chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("tests/")}


@pytest.mark.more
def test_each_claim_has_a_test_in_make_test_and_nothing_else_is_there() -> None:
    assert collected("not more and not slow", "tests/stack", "tests/pipeline") == set(CLAIMS)


@pytest.mark.more
@pytest.mark.parametrize(("kind", "chosen"), [("more", "more and not slow"), ("slow", "slow")])
def test_a_file_is_started_where_it_has_such_tests(kind: str, chosen: str) -> None:
    found = collected(chosen, "tests/stack")
    assert len(found) > 10 and found <= set(files_of("stack", kind))
    # Without TRL its files are skipped as a whole.
    assert set(files_of("stack", kind)) - {"tests/stack/test_trl.py", "tests/stack/test_trl_routing.py"} <= found
