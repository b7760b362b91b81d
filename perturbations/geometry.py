"""What an operator may ask of the model: embeddings, their scale, and neighbors. Refreshed after a weight sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from perturbations.neighbors import NeighborIndex


class Geometry:
    """A model's input embedding as operators see it. All values are cached until :meth:`refresh`."""

    def __init__(
        self,
        lookup: Callable[[Tensor], Tensor],
        input_matrix: Callable[[], Tensor],
        output_matrix: Callable[[], Tensor] | None = None,
        special_ids: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        """
        Args:
            lookup: ids of any shape to their input embeddings, shape + (D,).
            input_matrix: gives the input embedding matrix E, (V, D).
            output_matrix: gives the output embedding matrix, (V, D); None where the model ties the two.
            special_ids: gives the special and never-trained tokens, which some options leave out.
        """
        self.lookup = lookup
        self._matrices = {"input": input_matrix, "output": output_matrix or input_matrix}
        self._special_ids = special_ids
        self._indices: dict[tuple[str, str, bool], NeighborIndex] = {}
        self._rms: Tensor | None = None

    def rms(self) -> Tensor:
        """Root-mean-square element of E, a float32 scalar tensor."""
        if self._rms is None:
            self._rms = self._matrices["input"]().float().square().mean().sqrt()
        return self._rms

    def index(self, metric: str, space: str = "input", skip_special: bool = False) -> NeighborIndex:
        """The neighbor index over the input or output embeddings, built on first use.

        Args:
            metric: cosine, l2, l1 or dot.
            space: ``input`` or ``output``.
            skip_special: leave special and never-trained tokens out of the neighbors.
        """
        from perturbations.neighbors import ExactIndex

        key = (metric, space, skip_special)
        if key not in self._indices:
            exclude = self._special_ids() if skip_special else ()
            self._indices[key] = ExactIndex(self._matrices[space](), metric=metric, exclude=exclude)
        return self._indices[key]

    def refresh(self) -> None:
        """Forgets everything that depends on the weights."""
        self._indices.clear()
        self._rms = None


def matrix_geometry(embedding: Tensor, special_ids: Sequence[int] = ()) -> Geometry:
    """The geometry of a plain matrix E, (V, D): for tests and for models whose embedding is one tensor."""
    return Geometry(
        lambda ids: torch.nn.functional.embedding(ids, embedding),
        lambda: embedding,
        None,
        lambda: special_ids,
    )
