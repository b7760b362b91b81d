# SPDX-License-Identifier: Apache-2.0
"""The list of mutations fits the source."""

import pytest

from tests.conftest import ROOT
from tests.mutations import MUTATIONS, Mutation, problem


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.wrong)
def test_each_mutation_can_be_made(mutation: Mutation) -> None:
    assert problem(mutation) is None
    assert mutation.old != mutation.new
    for test in mutation.tests.split():
        file, *names = test.split("::")
        text = (ROOT / "tests" / "fast" / file).read_text(encoding="utf-8")
        for name in names:
            bare = name.partition("[")[0]
            assert f"def {bare}(" in text or f"class {bare}" in text, test
