# SPDX-License-Identifier: Apache-2.0
"""The self-test of `ngrpo doctor`, on the real stack."""

import pytest

from ngrpo.commands import doctor

pytestmark = pytest.mark.slow


def test_a_rollout_and_its_replay(smollm2: str) -> None:
    finding = doctor._self_test(smollm2)
    assert finding.fix is None, finding
    assert finding.state.startswith("V1 model runner, ")
    assert "with the replay" in finding.state
