# SPDX-License-Identifier: Apache-2.0
"""The V2 runner with requests that exclude tokens, as test_sampling_parameters.py has them for V1."""

from __future__ import annotations

from typing import Any

import pytest

from tests.own_process import result_of
from tests.stack.request_limits import EVERY, name_of

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.fixture(scope="module")
def limits(tiny: str) -> dict[str, Any]:
    return result_of("tests.stack.v2_limits", tiny, timeout=600.0)


@pytest.mark.parametrize("name", [name_of(spec) for spec in EVERY])
def test_every_answer_is_legal(limits: dict[str, Any], name: str) -> None:
    assert isinstance(limits[name], int), limits[name]
    assert limits[name] > 0, "nothing was perturbed"
