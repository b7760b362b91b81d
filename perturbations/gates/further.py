# SPDX-License-Identifier: Apache-2.0
"""The further gates: by position (`first`, `bursts`), logits (`top_margin`, `confidence`) or their course (`swi`)."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perturbations import Gate, GateStep, Positions, option, register_gate


@register_gate("first")
@dataclass(frozen=True, kw_only=True)
class First(Gate):
    """Open for the first tokens of the response only."""

    length: int = option(64, "generated positions that are open", low=1)

    def plan(self, positions: Positions) -> np.ndarray:
        """Fewer than ``length`` tokens are before the position."""
        return positions.generated < self.length


@register_gate("bursts")
@dataclass(frozen=True, kw_only=True)
class Bursts(Gate):
    """Cuts the response into stretches of equal length and opens each one with the same probability."""

    length: int = option(8, "positions in a stretch", low=1)
    share: float = option(0.1, "probability that a stretch is open", low=0.0, high=1.0)

    def plan(self, positions: Positions) -> np.ndarray:
        """One draw for each stretch, at its first position."""
        first_of_stretch = positions.positions - positions.generated % self.length
        draws = positions.uniform(1, at=first_of_stretch)[:, 0]  # (N,)
        return draws < self.share


@register_gate("top_margin")
@dataclass(frozen=True, kw_only=True)
class TopMargin(Gate):
    """Open where p(likeliest) - p(second likeliest) is at most the margin, at the sampling temperature."""

    margin: float = option(0.2, "largest difference of the two largest probabilities", low=0.0, high=1.0)

    def open(self, step: GateStep) -> Tensor:
        """exp(z₁ - log Z) - exp(z₂ - log Z) ≤ margin."""
        best, _ = step.top(2)  # (B, 2)
        p = torch.exp(best - step.log_total().unsqueeze(-1))  # (B, 2)
        return p[:, 0] - p[:, 1] <= self.margin


@register_gate("confidence")
@dataclass(frozen=True, kw_only=True)
class Confidence(Gate):
    """Open where p(likeliest) is at least τ, at the sampling temperature: ThinkRouter's p_max ≥ τ."""

    paper = "ThinkRouter, arXiv 2602.11683"

    tau: float = option(0.9, "τ, smallest probability of the likeliest token", low=0.0, high=1.0)

    def open(self, step: GateStep) -> Tensor:
        """exp(z₁ - log Z) ≥ τ."""
        best, _ = step.top(1)  # (B, 1)
        return torch.exp(best[:, 0] - step.log_total()) >= self.tau


@register_gate("swi")
@dataclass(frozen=True, kw_only=True)
class Swi(Gate):
    """Opens and closes by the entropy H against its value H̄ where the block began.

    The first block is open. An open block ends where H < H̄, a closed one where H > H̄ after at least ``window``
    positions: SwiReasoning's mode switch criterion. H is at the sampling temperature.
    """

    paper = "SwiReasoning, arXiv 2510.05069"

    window: int = option(512, "least length of a closed block, in positions", low=0)
    max_switches: int | None = option(None, "number of open blocks, after which the gate stays closed", low=1)

    def initial_state(self) -> Mapping[str, float]:
        """The block, as ``closed`` (1) or open (0), its ``length``, its ``reference`` H̄; the open blocks that ended."""
        return {"closed": 0, "length": 0, "reference": 0, "switches": 0}

    def open(self, step: GateStep) -> Tensor:
        """Whether the position's block is open."""
        return ~self._block(step)["closed"]

    def advance(self, step: GateStep, fed: Tensor) -> Mapping[str, Tensor]:
        """The block that the position belongs to."""
        return self._block(step)

    def _block(self, step: GateStep) -> dict[str, Tensor]:
        """The state after each position, by the names of :meth:`initial_state`, (B,) each."""
        state = step.state
        entropy = step.entropy()
        closed = state["closed"] > 0
        begun = state["length"] > 0  # False at a response's first position
        ends = begun & ~closed & (entropy < state["reference"])
        opens = closed & (entropy > state["reference"]) & (state["length"] >= self.window)
        if self.max_switches is not None:
            opens = opens & (state["switches"] < self.max_switches)
        goes_on = begun & ~ends & ~opens
        return {
            "closed": (closed | ends) & ~opens,
            "length": torch.where(goes_on, state["length"], 0) + 1,
            "reference": torch.where(goes_on, state["reference"], entropy),
            "switches": state["switches"] + ends,
        }
