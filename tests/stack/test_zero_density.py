# SPDX-License-Identifier: Apache-2.0
"""Densities on two ranks under ZeRO-3, one of which may have no perturbed position."""

from __future__ import annotations

import pytest

from tests.fast.density_model import EVERY
from tests.two_ranks import run_two_ranks

pytestmark = pytest.mark.stack


def test_two_ranks_gather_alike_for_every_density() -> None:
    for rank, output in enumerate(run_two_ranks("tests.stack.zero_density", timeout=400)):
        assert output.count(f"rank {rank}: ") == len(EVERY)
