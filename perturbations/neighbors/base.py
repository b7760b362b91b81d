# SPDX-License-Identifier: Apache-2.0
"""The contract of a neighbor index."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class NeighborIndex(ABC):
    """Nearest tokens of a token. An index belongs to one state of the weights; new weights need a new one."""

    @abstractmethod
    def query(self, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k nearest other tokens of each token.

        Args:
            token_ids: (B,) int64 on the embedding's device.
            k: how many, at least 1.

        Returns:
            ids (B, k) int64, best first and never the token itself; scores (B, k) float32, higher is nearer.

        Raises:
            ValueError: where there are fewer than k other tokens.
        """

    def precompute(self, k: int) -> None:
        """Does all the work of queries for up to k neighbors ahead of time, where the index can."""
        return None

    def follow(self) -> None:
        """Keeps what an index of later weights can take over, where the index can; called before anything is asked."""
        return None

    def take_over(self, old: NeighborIndex) -> None:
        """Takes from an index of earlier weights, which has been told to follow, what these weights have not changed.

        Answers are the same with and without.
        """
        return None
