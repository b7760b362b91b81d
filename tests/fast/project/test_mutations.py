# SPDX-License-Identifier: Apache-2.0
"""The list of mutations fits the source."""

import pytest

from tests.mutations import MUTATIONS, Mutation, problem


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.wrong)
def test_each_mutation_can_be_made(mutation: Mutation) -> None:
    assert problem(mutation) is None
    assert mutation.old != mutation.new
    assert mutation.tests
