# SPDX-License-Identifier: Apache-2.0
"""What was fed to the model: one sparse record per trajectory."""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass

import numpy as np

from perturbations.replay import packing


def model_fingerprint(vocabulary: int, hidden: int) -> int:
    """What a record keeps of its model: a hash of the embedding matrix's shape (V, D), in [1, 2^16).

    The shape and not the weights, which every update changes.
    """
    return zlib.crc32(f"{vocabulary} {hidden}".encode()) % 0xFFFF + 1


@dataclass(frozen=True, eq=False)
class ReplayRecord:
    """The perturbed inputs of one trajectory of N perturbed positions.

    Attributes:
        seed: the trajectory's seed, in [0, 2^48), from which noise is drawn again.
        prompt_tokens: length of the prompt.
        num_tokens: length of the trajectory, prompt included.
        positions: perturbed positions, ascending, counted from the first prompt token, (N,) int32.
        ids: candidates, (N, K) int32.
        weights: weights of the candidates, (N, K) float32.
        sigma: noise scales, (N,) float32, or None where nothing is noisy.
        agreed: whether the token in the text is the ordinarily sampled one, (N,) bool.
        vectors: what was added to the mixture, (N, D) float32, or None: 4·D bytes per perturbed position.
        normalizer: what normalising the weights divided out, (N,) float32, or None where no density needs it.
        model: :func:`model_fingerprint` of the model whose tokens ``ids`` are; 0 where it is not known.
    """

    seed: int
    prompt_tokens: int
    num_tokens: int
    positions: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    sigma: np.ndarray | None
    agreed: np.ndarray
    vectors: np.ndarray | None = None
    normalizer: np.ndarray | None = None
    model: int = 0

    def __len__(self) -> int:
        return len(self.positions)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReplayRecord) and self.to_bytes() == other.to_bytes()

    @property
    def size(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, np.ndarray))

    def truncate(self, num_tokens: int) -> ReplayRecord:
        """The record of the trajectory's first ``num_tokens`` tokens."""
        if num_tokens >= self.num_tokens:
            return self
        count = int(np.searchsorted(self.positions, num_tokens))
        arrays = {name: part[:count] for name, part in vars(self).items() if isinstance(part, np.ndarray)}
        return dataclasses.replace(
            self, prompt_tokens=min(self.prompt_tokens, num_tokens), num_tokens=num_tokens, **arrays
        )

    def check_model(self, vocabulary: int, hidden: int) -> None:
        """Refuses a model that this record cannot be of.

        Args:
            vocabulary: V of the model that is to be fed.
            hidden: D, likewise.

        Raises:
            ValueError: where the rollout's embedding matrix had another shape, or there is no row for a candidate.
        """
        here = f"a model with {vocabulary} tokens and {hidden} dimensions"
        if self.model not in (0, model_fingerprint(vocabulary, hidden)):
            raise ValueError(
                f"replay record: it is of another model, and cannot be replayed in {here}. Rollout and replay must have"
                " the same vocabulary and the same hidden size."
            )
        self.check_tokens(vocabulary)
        if self.vectors is not None and self.vectors.shape[1] != hidden:
            raise ValueError(f"replay record: vectors of {self.vectors.shape[1]} dimensions do not fit {here}.")

    def check_tokens(self, vocabulary: int) -> None:
        """Raises ``ValueError`` where a candidate is none of the V tokens of a vocabulary."""
        lowest, highest = int(self.ids.min(initial=0)), int(self.ids.max(initial=0))
        if lowest < 0 or highest >= vocabulary:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"replay record: token id {wrong} is none of the model's: 0 to {vocabulary - 1}.")

    def to_bytes(self) -> bytes:
        """As bytes, without loss: see :func:`perturbations.replay.packing.record_bytes`."""
        return packing.record_bytes(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> ReplayRecord:
        """Reads what :meth:`to_bytes` wrote.

        Raises:
            ValueError: where the bytes are not a whole record of this version, as it was written.
        """
        return cls(*packing.record_fields(data))
