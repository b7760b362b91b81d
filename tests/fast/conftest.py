# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the fast tests."""

from types import SimpleNamespace

import pytest

from ngrpo.machine.hardware import host_plan

FREE = 10**12


@pytest.fixture(autouse=True)
def _room_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's disk has a TB free, so that what is said of a command does not depend on the machine of the tests."""
    monkeypatch.setattr(host_plan, "disk_usage", lambda folder: SimpleNamespace(total=FREE, free=FREE))
