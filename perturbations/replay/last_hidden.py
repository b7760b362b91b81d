# SPDX-License-Identifier: Apache-2.0
"""The last hidden states of a replayed forward: what its output layer was given."""

from __future__ import annotations

from types import TracebackType

from jaxtyping import Float, Int64
from torch import Tensor, nn

from perturbations.errors import UsageError


class LastHidden:
    """Keeps what a model's output layer is given, while it is entered as a context."""

    def __init__(self, head: nn.Module | None) -> None:
        """
        Args:
            head: of ``get_output_embeddings()``: last hidden states (…, D) to logits (…, V).

        Raises:
            UsageError: where the model names none.
        """
        if head is None:
            raise UsageError(
                "perturbation: the model names no output layer (get_output_embeddings() is None), so the last hidden"
                " states that this perturbation reads are not known. Use another model, or another perturbation."
            )
        self._head = head
        self._given: Tensor | None = None

    def __enter__(self) -> LastHidden:
        self._hook = self._head.register_forward_pre_hook(self._keep)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hook.remove()
        self._given = None

    def _keep(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._given = inputs[0]

    def at(self, rows: Int64[Tensor, " positions"], count: int) -> Float[Tensor, "positions hidden"]:
        """The last hidden states of some rows of the latest forward, with gradient.

        Args:
            rows: rows of the flattened forward, (N,).
            count: how many rows the forward's logits have.

        Returns:
            (N, D) in the model's dtype.

        Raises:
            RuntimeError: where the output layer was not called with as many rows.
        """
        given = None if self._given is None else self._given.reshape(-1, self._given.shape[-1])
        if given is None or len(given) != count:
            seen = "was not called" if given is None else f"was given {len(given)} rows"
            raise RuntimeError(
                f"density: {type(self._head).__name__}, the model's output layer, {seen} in a forward of {count} rows"
                " of logits. A fused or sliced output layer hides the last hidden states that this density reads."
            )
        return given[rows]
