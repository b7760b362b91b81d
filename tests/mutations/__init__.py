# SPDX-License-Identifier: Apache-2.0
"""Mutations of formulas: each changes one line of the product, and the tests named beside it must then fail.

Run by hand, from the project's root (a few seconds for each mutation):

    python -m tests.mutations                 # all of them
    python -m tests.mutations normal copo     # those whose file or reason contains one of these words

and by `make test-all`. A mutation that survives shows a formula that no test holds; the exit status is then 1. Nothing
in the working tree is touched: the mutations are made in a temporary copy.

To add one, append its old text, its new text and what is wrong then to its file and tests, in one of the files
``of_*.py``. The old text must occur exactly once in the file, so a line that was rewritten takes its mutation along;
tests/fast/project/test_mutations.py checks it.
"""

from tests.mutations import of_edges, of_inputs, of_methods, of_rewards, of_settings, of_steps, of_values
from tests.mutations.mutation import Mutation, problem, survives

MUTATIONS = [
    Mutation(file, old, new, tests, wrong)
    for part in (of_edges, of_inputs, of_methods, of_rewards, of_settings, of_steps, of_values)
    for (file, tests), rows in part.MUTATIONS.items()
    for old, new, wrong in rows
]

__all__ = ["MUTATIONS", "Mutation", "problem", "survives"]
