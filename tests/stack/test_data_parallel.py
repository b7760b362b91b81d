# SPDX-License-Identifier: Apache-2.0
"""vLLM's own data parallelism: two ranks behind one AsyncLLM, which spreads the requests over them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.own_process import result_of
from tests.stack.data_parallel_rollout import SAMPLES

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.fixture(scope="module")
def seen(tiny: str) -> dict[str, Any]:
    return result_of("tests.stack.data_parallel_rollout", tiny)


def test_both_ranks_answer(seen: dict[str, Any]) -> None:
    assert len(seen["fingerprints"]) == 2 and len(set(seen["fingerprints"])) == 1
    assert sum(seen["records of each rank"]) == SAMPLES
    assert min(seen["records of each rank"]) >= 2, "or the ranks had nothing to agree about"


def test_the_samples_of_a_prompt_differ(seen: dict[str, Any]) -> None:
    assert (seen["different"], seen["seeds"]) == (SAMPLES, SAMPLES)


def test_a_seed_gives_the_same_answer_on_either_rank(seen: dict[str, Any]) -> None:
    one, other = seen["seeded"]
    assert one == other


def test_replay_equals_rollout(seen: dict[str, Any]) -> None:
    assert seen["edits"] > 50
    assert seen["gap"] <= 1e-4
    assert seen["without"] > 1e-2


def test_an_aborted_request_leaves_no_record(seen: dict[str, Any]) -> None:
    assert seen["after an abort"] == ["after"]
