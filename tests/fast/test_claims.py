# SPDX-License-Identifier: Apache-2.0
"""`make test` runs a file for each claim, and `make test-more` all that is left."""

import subprocess
import sys

import pytest

from tests.claims import CLAIMS, files_of
from tests.conftest import ROOT

COLLECT = """
import pytest

class Kinds:
    def pytest_collection_finish(self, session):
        for item in session.items:
            kind = next((name for name in ("slow", "more") if item.get_closest_marker(name)), "test")
            print("KIND", kind, item.nodeid.split(":")[0])

pytest.main(["tests/stack", "tests/pipeline", "--collect-only", "-qq"], plugins=[Kinds()])
"""
# Without TRL these are skipped as a whole.
OPTIONAL = {"tests/stack/test_trl.py", "tests/stack/test_trl_routing.py"}


@pytest.mark.more
def test_each_file_is_started_where_it_has_tests_and_each_claim_in_make_test() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, check=False)
    found: dict[str, set[str]] = {"test": set(), "more": set(), "slow": set()}
    for line in done.stdout.splitlines():
        if line.startswith("KIND "):
            _, kind, file = line.split()
            found[kind].add(file)
    assert found["test"] == set(CLAIMS), done.stderr
    for kind in ("more", "slow"):
        there = {file for file in found[kind] if file.startswith("tests/stack/")}
        assert len(there) > 10 and there <= set(files_of("stack", kind))
        assert set(files_of("stack", kind)) - OPTIONAL <= there
