# SPDX-License-Identifier: Apache-2.0
"""A run's settings in the environment of a test, as `ngrpo.trainer.launch` puts them into that of a worker."""

from __future__ import annotations

from typing import Any

import pytest

from ngrpo.trainer.run_settings import RunSettings


def run_with(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Makes ``RunSettings(**settings)`` the current run's until the test ends."""
    for name, value in RunSettings(**settings).env().items():
        monkeypatch.setenv(name, value)
