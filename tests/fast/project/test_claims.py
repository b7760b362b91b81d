# SPDX-License-Identifier: Apache-2.0
"""`make test` runs a file for each claim, and `make test-more` all that is left."""

import subprocess
import sys

import pytest

from tests.claims import CLAIMS
from tests.conftest import ROOT


@pytest.mark.more
def test_each_claim_has_a_test_in_make_test_and_nothing_else_is_there() -> None:
    chosen = ["-m", "not more and not slow", "--collect-only", "-qq"]
    command = [sys.executable, "-m", "pytest", "tests/stack", "tests/pipeline", *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert {line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("tests/")} == set(CLAIMS)
