# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks: both draw the same tokens and edits, and the replay is exact."""

from __future__ import annotations

import pytest

from tests.own_process import result_of
from tests.two_ranks import run_two_ranks

pytestmark = pytest.mark.stack


def test_two_ranks(tiny: str) -> None:
    seen = result_of("tests.stack.tensor_parallel_rollout", tiny)
    assert (seen["ranks"], seen["specs"]) == (2, 1)
    assert seen["edits"] > 30
    assert seen["same_neighbors"], "each rank looks among its own rows, and they share what they find"
    assert seen["gap"] <= 1e-4
    assert seen["without"] > 1e-2
    assert seen["seconds"] > 0, "a sound engine proves itself again, as after a weight sync"
    assert "does not feed" in seen["failure"] and "off by" in seen["failure"], "one rank lost its overrides"


def test_two_ranks_share_the_embeddings_of_vllms_layers() -> None:
    for output in run_two_ranks("tests.stack.embedding_ranks"):
        assert "ok" in output.splitlines()
