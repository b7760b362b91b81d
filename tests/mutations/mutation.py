# SPDX-License-Identifier: Apache-2.0
"""A wrong line, and whether its tests see it."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("perturbations", "ngrpo", "tests", "examples", "benchmarks", "docs")
_FAST = "tests/fast/"


@dataclass(frozen=True)
class Mutation:
    """One wrong line.

    Attributes:
        file: path from the project's root.
        old: text that occurs exactly once there.
        new: what takes its place.
        tests: tests in tests/fast, of which at least one must fail, as pytest's arguments without that folder.
        wrong: what is wrong then, in a few words.
    """

    file: str
    old: str
    new: str
    tests: str
    wrong: str


def problem(mutation: Mutation, root: Path = ROOT) -> str | None:
    """Why a mutation cannot be made, or None."""
    file = root / mutation.file
    if not file.is_file():
        return f"there is no file {mutation.file}"
    count = file.read_text(encoding="utf-8").count(mutation.old)
    return None if count == 1 else f"its old text occurs {count} times in {mutation.file}, not once"


def run_pytest(root: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *(_FAST + test for test in tests)]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def survives(mutation: Mutation, root: Path) -> bool:
    """Whether the mutation's tests pass in the copy at ``root`` although its line is wrong.

    Raises:
        RuntimeError: where the mutation cannot be made, or pytest does neither pass nor fail.
    """
    reason = problem(mutation, root)
    if reason is not None:
        raise RuntimeError(f"mutation {mutation.wrong!r}: {reason}")
    file = root / mutation.file
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        result = run_pytest(root, mutation.tests.split())
    finally:
        file.write_text(text, encoding="utf-8")
    if result.returncode not in (0, 1):
        raise RuntimeError(f"mutation {mutation.wrong!r}: pytest could not run\n{result.stdout[-2000:]}")
    return result.returncode == 0
