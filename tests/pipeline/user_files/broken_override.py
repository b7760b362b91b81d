# SPDX-License-Identifier: Apache-2.0
"""A file of a user's that breaks the engine's override as it is imported: every vector lands one row further on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perturbations.methods.soft_grpo import Gumbel


@dataclass(frozen=True, kw_only=True)
class Broken(Gumbel):
    """As `gumbel`, in an engine that feeds it to the wrong rows."""

    name = "broken"


def _break() -> None:
    from ngrpo.rollout.input_override import InputOverride

    put = InputOverride.put

    def one_row_off(self: InputOverride, rows: Any, vectors: Any, mask: Any = None, on_host: Any = None) -> None:
        put(self, rows + 1, vectors, mask)

    InputOverride.put = one_row_off


_break()
