# SPDX-License-Identifier: Apache-2.0
"""The V2 runner under load, and with requests that exclude tokens: what test_load and test_request_limits hold of V1.

In processes of their own and with a small random model: Triton's kernels are interpreted (:mod:`tests.stack.v2_load`).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.own_process import result_of
from tests.stack.request_limits import EVERY, name_of

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.fixture(scope="module", params=["asynchronous", "synchronous"])
def load(tiny: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    return result_of("tests.stack.v2_load", tiny, "load", request.param, timeout=600.0)


@pytest.fixture(scope="module")
def limits(tiny: str) -> dict[str, Any]:
    return result_of("tests.stack.v2_load", tiny, "limits", "asynchronous", timeout=600.0)


def test_a_hundred_preemptions(load: dict[str, Any]) -> None:
    assert load["preempted"] >= 100, "the cache is not small enough for this test to show anything"
    assert load["edits"] >= 600
    assert load["gap"] <= 1e-4 and load["unreplayed"] >= 1e-2


def test_prompts_in_chunks_of_one_token(load: dict[str, Any]) -> None:
    assert load["largest chunk"] == 1 and load["edits of chunks"] >= 8
    assert load["gap of chunks"] <= 1e-4


def test_nothing_is_left(load: dict[str, Any]) -> None:
    assert load["left"] == 0


@pytest.mark.parametrize("name", [name_of(spec) for spec in EVERY])
def test_every_answer_is_legal(limits: dict[str, Any], name: str) -> None:
    """A grammar, lists of tokens, filters and biases in one batch: see :mod:`tests.stack.request_limits`."""
    assert isinstance(limits[name], int), limits[name]
    assert limits[name] > 0, "nothing was perturbed"
