# SPDX-License-Identifier: Apache-2.0
"""The rows of a step: what goes into its computations, and what comes out."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from perturbations import streams
from perturbations.row_blocks import Summary


class StepRows(NamedTuple):
    """The B rows of a step, (B,) int64 each.

    Compiled parts take them as one matrix (B, 6): torch.compile specialises on where a tensor begins in its memory, and
    each column of an upload begins elsewhere.
    """

    slots: Tensor  # of the trajectories
    first: Tensor  # positions of their first generated tokens
    positions: Tensor  # of the tokens that are drawn
    kept: Tensor  # 0 where a prompt is not complete, so that vLLM throws the token away
    seeds: Tensor  # of the trajectories
    token_keys: Tensor  # of `Stream.TOKEN`

    @classmethod
    def view(cls, matrix: Tensor) -> "StepRows":
        """The columns of a matrix (B, 6) int64."""
        return cls(*matrix.unbind(1))


class StepColumns(NamedTuple):
    """What the host tells a graph of the B rows of a step, (B,) int64 each; :class:`HostColumns` is its other side."""

    slots: Tensor
    first: Tensor
    positions: Tensor
    kept: Tensor
    seeds: Tensor
    eligible: Tensor  # 1 where the request may be perturbed, and a further gate's plan selects the position


class HostColumns(NamedTuple):
    """:class:`StepColumns` on the host, before their upload: the rows of a matrix."""

    slots: np.ndarray
    first: np.ndarray
    positions: np.ndarray
    kept: np.ndarray
    seeds: np.ndarray
    eligible: np.ndarray


class GatedRows(NamedTuple):
    """The G rows of a step that may be edited, and the keys of their draws, (G,) int64 each; one matrix (G, 4)."""

    rows: Tensor  # their numbers, ascending
    weights: Tensor  # keys of `Stream.WEIGHTS`
    noise: Tensor  # keys of `Stream.NOISE`
    gate_open: Tensor  # keys of `Stream.GATE_OPEN`

    STREAMS = (streams.Stream.WEIGHTS, streams.Stream.NOISE, streams.Stream.GATE_OPEN)

    @classmethod
    def view(cls, matrix: Tensor) -> "GatedRows":
        """The columns of a matrix (G, 4) int64."""
        return cls(*matrix.unbind(1))

    @property
    def keys(self) -> dict[streams.Stream, Tensor]:
        """As :attr:`perturbations.Step.keys` has them."""
        return dict(zip(self.STREAMS, self[1:], strict=True))


class Logits(NamedTuple):
    """The sampler's inputs at the B rows of a step, as of :meth:`~ngrpo.rollout.perturber.RolloutPerturber.finish`.

    ``drawable`` is None where no request filters; ``hidden`` (B, D) is there where the perturbation reads it.
    """

    scaled: Tensor
    temperature: Tensor
    drawable: Tensor | None
    greedy: Tensor | None
    hidden: Tensor | None


class Drawn(NamedTuple):
    """The next tokens of B rows, (B,) int64, and log π; summary of z̃.

    ``log_total``: log Σ exp of what filters left, where log π is normalised over that; else None.
    """

    tokens: Tensor
    log_probs: Tensor
    summary: Summary
    log_total: Tensor | None


class Edited(NamedTuple):
    """Tokens and log π after the gate's verdict, (N,) each; the edits' vectors, (G, D), and record, by name.

    ``recorded`` has ``fed`` and ``agreed``, (G,) bool, and the fields of :class:`perturbations.InputEdit`.
    """

    tokens: Tensor
    log_probs: Tensor
    vectors: Tensor | None
    recorded: dict[str, Tensor]


def upload_matrices(upload: Callable[[np.ndarray], Tensor], *groups: Sequence[np.ndarray]) -> list[Tensor]:
    """Groups of columns, each (N,) of a number or bool, as a matrix (N, columns) int64 each, by one copy.

    ``upload`` copies an array to the device.
    """
    matrices = [np.stack(columns, axis=1, dtype=np.int64, casting="unsafe") for columns in groups]
    # The matrices before the last have an even number of columns, so that each begins at a multiple of 16 bytes: a
    # compiled kernel copies an input that does not.
    uploaded = upload(np.concatenate([matrix.ravel() for matrix in matrices]))
    sizes = [matrix.size for matrix in matrices]
    return [part.view(matrix.shape) for part, matrix in zip(uploaded.split(sizes), matrices)]
