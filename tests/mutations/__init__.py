# SPDX-License-Identifier: Apache-2.0
"""Mutations of formulas: each changes one line of the product, and the tests named beside it must then fail.

Run by hand, from the project's root (a few seconds for each mutation):

    python -m tests.mutations                 # all of them
    python -m tests.mutations normal copo     # those whose file or reason contains one of these words

and by `make test-all`. A mutation that survives shows a formula that no test holds; the exit status is then 1. Nothing
in the working tree is touched: the mutations are made in a temporary copy.

To add one, append a :class:`Mutation` to the list of its part, in one of the files ``of_*.py``. ``old`` must occur
exactly once in the file, which tests/fast/test_mutations.py checks, so a line that was rewritten takes its mutation
along.
"""

from __future__ import annotations

from tests.mutations.mutation import Mutation, problem, survives
from tests.mutations.of_advantages import ADVANTAGES, AT_THE_BOUND, BEST_OF_K, CREDITS, NOISES, OVERLONG, RISK
from tests.mutations.of_gradients import GRADIENTS
from tests.mutations.of_inputs import DENSITIES, MIXTURES, SAMPLING
from tests.mutations.of_schedules import SCHEDULES
from tests.mutations.of_second_rounds import SECOND_ROUNDS
from tests.mutations.of_values import VALUES

MUTATIONS = [
    *DENSITIES, *ADVANTAGES, *BEST_OF_K, *AT_THE_BOUND, *RISK, *OVERLONG, *CREDITS, *NOISES, *SAMPLING, *MIXTURES,
    *SCHEDULES, *GRADIENTS, *SECOND_ROUNDS, *VALUES,
]  # fmt: skip

__all__ = ["MUTATIONS", "Mutation", "problem", "survives"]
