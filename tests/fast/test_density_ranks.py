# SPDX-License-Identifier: Apache-2.0
"""Two ranks gather and reduce alike for every density, also where one of them has no perturbed position."""

from __future__ import annotations

import pytest

from tests.fast.density_model import EVERY, name_of
from tests.two_ranks import run_two_ranks


@pytest.mark.more
def test_two_ranks_call_alike() -> None:
    for output in run_two_ranks("tests.fast.density_ranks"):
        assert output.split() == [name_of(perturbation) for perturbation in EVERY]
