# SPDX-License-Identifier: Apache-2.0
"""The list of mutations fits the source, and a run of it tells a caught mutation from one that survives."""

from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, Mutation, problem, survives


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.wrong)
def test_each_mutation_can_be_made(mutation: Mutation) -> None:
    assert problem(mutation) is None
    assert mutation.old != mutation.new and mutation.tests


@pytest.mark.more
def test_a_caught_mutation_and_one_that_survives(tmp_path: Path) -> None:
    """In a small project of its own: one test, which holds one of two lines."""
    (tmp_path / "tests" / "fast").mkdir(parents=True)
    (tmp_path / "formula.py").write_text("held = 1\nloose = 2\n")
    (tmp_path / "tests" / "fast" / "test_it.py").write_text("import formula\n\ndef test(): assert formula.held == 1\n")
    held = Mutation("formula.py", "held = 1", "held = 3", "test_it.py", "the held line")
    loose = Mutation("formula.py", "loose = 2", "loose = 3", "test_it.py", "the loose line")
    assert not survives(held, tmp_path)
    assert survives(loose, tmp_path)
    assert (tmp_path / "formula.py").read_text() == "held = 1\nloose = 2\n"
    for broken, words in (
        (Mutation("formula.py", "=", "", "test_it.py", "twice"), "occurs 2 times"),
        (Mutation("formula.py", "held = 1", "held = = 1", "test_it.py", "no Python"), "could not run"),
    ):
        with pytest.raises(RuntimeError, match=words):
            survives(broken, tmp_path)
