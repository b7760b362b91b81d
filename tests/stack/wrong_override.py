# SPDX-License-Identifier: Apache-2.0
"""Overrides that are wrong in the ways in which an engine's could be, and what the probe and the gap's scale see."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ngrpo.rollout.input_override import InputOverride
from tests.stack.tiny_models import HIDDEN

_put = InputOverride.put


def _dropped(_self: InputOverride, _rows: Any, _vectors: Any, _mask: Any = None, _on_host: Any = None) -> None:
    return


def _one_row_off(self: InputOverride, rows: Any, vectors: Any, mask: Any = None, _on_host: Any = None) -> None:
    _put(self, rows + 1, vectors, mask)


def _first_row(self: InputOverride, rows: Any, vectors: Any, mask: Any = None, _on_host: Any = None) -> None:
    """As where ids of shape (1, N) are taken for one row: only what belongs there anyway is right."""
    kept = rows == 0
    _put(self, rows[kept], vectors[kept], None if mask is None else mask[kept])


def _scaled(self: InputOverride, rows: Any, vectors: Any, mask: Any = None, _on_host: Any = None) -> None:
    _put(self, rows, vectors * math.sqrt(HIDDEN), mask)


def _others_disturbed(self: InputOverride, rows: Any, vectors: Any, mask: Any = None, _on_host: Any = None) -> None:
    _put(self, rows, vectors, mask)
    _put(self, rows + 1, vectors, mask)


PUTS: dict[str, Callable[..., None]] = {
    "right": _put,
    "dropped": _dropped,
    "one row off": _one_row_off,
    "first row alone": _first_row,
    "scaled once too often": _scaled,
    "others disturbed": _others_disturbed,
}
