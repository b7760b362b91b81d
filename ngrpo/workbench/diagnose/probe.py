# SPDX-License-Identifier: Apache-2.0
"""A perturbation that changes nothing and keeps the steps at which chosen tokens were the likeliest."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from perturbations import Perturbation, Proposal, Step, option
from perturbations.edit import one_hot

ADDRESS = f"{__name__}:Probe"


@dataclass
class Collection:
    """What the probe keeps, in this process: rows of real steps, by token.

    Attributes:
        limits: token to the most rows that are kept of it; empty: nothing is kept.
        rows: token to its rows: z̃ (V,) float32 on the host, and the position.
    """

    limits: dict[int, int] = field(default_factory=dict)
    rows: dict[int, list[tuple[Tensor, int]]] = field(default_factory=dict)

    def start(self, tokens: list[int], most: int) -> None:
        """Forgets what was kept and waits for these tokens."""
        self.limits, self.rows = dict.fromkeys(tokens, most), {token: [] for token in tokens}

    def stop(self) -> dict[int, list[tuple[Tensor, int]]]:
        """Hands over the rows and keeps no more."""
        rows, self.limits, self.rows = self.rows, {}, {}
        return rows


COLLECTION = Collection()


@dataclass(frozen=True, kw_only=True)
class Probe(Perturbation):
    """Feeds every token as it is. Also the perturbation that the engine is built with, before the first strategy."""

    paper = "none"

    until: str | None = option(None, "the whole answer is watched")

    def propose(self, step: Step) -> Proposal:
        """The sampled tokens, unchanged."""
        if COLLECTION.limits:
            for row, token in enumerate(step.logits.argmax(dim=-1).tolist()):
                rows = COLLECTION.rows.get(token)
                if rows is not None and len(rows) < COLLECTION.limits[token]:
                    rows.append((step.logits[row].float().cpu().clone(), int(step.positions[row])))
        return Proposal(one_hot(step.sampled), step.sampled)
