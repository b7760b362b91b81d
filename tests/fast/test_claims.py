# SPDX-License-Identifier: Apache-2.0
"""`make test` runs a file for each claim, and `make test-more` all that is left."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.claims import CLAIMS, files_of
from tests.conftest import ROOT

NOT_IN_MAKE_TEST = ("more", "slow")
"""Marks with which a test is no part of `make test`."""


def marks_of(function: ast.FunctionDef) -> set[str]:
    return {each.attr for mark in function.decorator_list for each in ast.walk(mark) if isinstance(each, ast.Attribute)}


@pytest.mark.parametrize("file", CLAIMS)
def test_a_claim_has_tests_of_its_own(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert any(not marks_of(test) & {*NOT_IN_MAKE_TEST} or "parametrize" in marks_of(test) for test in tests)
    everywhere = [
        ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)
    ]
    assert not any(mark in line for line in everywhere for mark in NOT_IN_MAKE_TEST)


def test_both_targets_leave_nothing_out() -> None:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    chosen = [line for line in lines if "not slow" in line]
    for tests in ("tests/fast", "tests/pipeline"):
        assert any(tests in line and '"more and not slow"' in line for line in chosen), tests
    assert any("$(call files,more and not slow," in line and "tests.claims stack more" in line for line in chosen)
    assert sum("not more and not slow" in line for line in chosen) == 3


@pytest.mark.more
@pytest.mark.parametrize("kind", ["more", "slow"])
def test_a_file_is_started_where_it_has_such_tests(kind: str) -> None:
    """As pytest collects them."""
    chosen = "slow" if kind == "slow" else "more and not slow"
    command = [sys.executable, "-m", "pytest", "tests/stack", "--collect-only", "-qq", "-m", chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    collected = {line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("tests/")}
    assert len(collected) > 10 and collected <= set(files_of("stack", kind)), done.stdout + done.stderr
    missing = {"tests/stack/test_trl.py"}  # without TRL it is skipped as a whole
    assert set(files_of("stack", kind)) - missing <= collected
