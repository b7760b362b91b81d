# SPDX-License-Identifier: Apache-2.0
"""The rows of a step: what goes into its computations, and what comes out of them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from perturbations import streams
from perturbations.row_blocks import Summary


class StepRows(NamedTuple):
    """The B rows of a step, (B,) int64 each.

    Compiled parts take them as one matrix (B, 6): torch.compile specialises on the alignment of a tensor's memory, and
    the columns of an upload, taken one by one, begin at different alignments.

    Attributes:
        slots: of the trajectories.
        first: positions of their first generated tokens.
        positions: of the tokens that are drawn.
        keeps_token: 0 where the prompt is incomplete, so that vLLM throws the drawn token away.
        seeds: of the trajectories.
        token_keys: the keys of `Stream.TOKEN`.
    """

    slots: Tensor
    first: Tensor
    positions: Tensor
    keeps_token: Tensor
    seeds: Tensor
    token_keys: Tensor

    @classmethod
    def view(cls, matrix: Tensor) -> "StepRows":
        """The columns of a matrix (B, 6) int64."""
        return cls(*matrix.unbind(1))


class StepColumns(NamedTuple):
    """What is uploaded for a graph, (B,) int64 each: the fields of :class:`StepRows`, without the keys.

    Attributes:
        eligible: 1 where the request may be perturbed, and the plan of a further gate selects the position.
    """

    slots: Tensor
    first: Tensor
    positions: Tensor
    keeps_token: Tensor
    seeds: Tensor
    eligible: Tensor


class HostColumns(NamedTuple):
    """:class:`StepColumns` on the host, before their upload: the rows of one matrix (6, B) int64."""

    slots: np.ndarray
    first: np.ndarray
    positions: np.ndarray
    keeps_token: np.ndarray
    seeds: np.ndarray
    eligible: np.ndarray


class GatedRows(NamedTuple):
    """The G rows of a step that may be edited, and the keys of their draws, (G,) int64 each.

    Compiled parts take them as one matrix (G, 4), as :class:`StepRows`.

    Attributes:
        rows: the numbers of the rows in the batch, ascending.
        weights: the keys of `Stream.WEIGHTS`.
        noise: the keys of `Stream.NOISE`.
        gate_open: the keys of `Stream.GATE_OPEN`.
    """

    rows: Tensor
    weights: Tensor
    noise: Tensor
    gate_open: Tensor

    STREAMS = (streams.Stream.WEIGHTS, streams.Stream.NOISE, streams.Stream.GATE_OPEN)

    @classmethod
    def view(cls, matrix: Tensor) -> "GatedRows":
        """The columns of a matrix (G, 4) int64."""
        return cls(*matrix.unbind(1))

    @property
    def keys(self) -> dict[streams.Stream, Tensor]:
        """The keys by stream, for :attr:`perturbations.Step.keys`."""
        return {
            streams.Stream.WEIGHTS: self.weights,
            streams.Stream.NOISE: self.noise,
            streams.Stream.GATE_OPEN: self.gate_open,
        }


class Logits(NamedTuple):
    """The sampler's inputs at the B rows of a step.

    Attributes:
        scaled: z̃, the logits divided by the temperature, (B, V); its dtype is that of ``RolloutPerturber.finish``.
        temperature: (B,) float32, 1 for greedy rows.
        drawable: the logits after top-k, top-p and min-p, (B, V) float32; None where no request filters.
        greedy: the argmax token of a greedy row and -1 elsewhere, (B,) int64; None where no row is greedy.
        hidden: the last hidden states, (B, D); None where the perturbation does not read them.
    """

    scaled: Tensor
    temperature: Tensor
    drawable: Tensor | None
    greedy: Tensor | None
    hidden: Tensor | None


class Drawn(NamedTuple):
    """The draw of B rows.

    Attributes:
        tokens: (B,) int64.
        log_probs: log π of the tokens, (B,) float32.
        summary: of z̃.
        log_total: log Σ exp of the logits that filters left, (B,) float32, where log π is normalised over these; else
            None.
    """

    tokens: Tensor
    log_probs: Tensor
    summary: Summary
    log_total: Tensor | None


class Edited(NamedTuple):
    """A step after the gate's verdict: N tokens, and the edits of G rows.

    Attributes:
        tokens: (N,) int64.
        log_probs: log π of the tokens, (N,) float32.
        vectors: of the edits, (G, D); None where they are not computed yet, or where there are none.
        recorded: ``fed`` and ``agreed``, (G,) bool, and the fields of :class:`perturbations.InputEdit` by name.
    """

    tokens: Tensor
    log_probs: Tensor
    vectors: Tensor | None
    recorded: dict[str, Tensor]


def upload_matrices(upload: Callable[[np.ndarray], Tensor], *groups: Sequence[np.ndarray]) -> list[Tensor]:
    """Uploads each group of columns as a matrix, all of them with one copy.

    Args:
        upload: copies an array to the device.
        groups: columns (N,) of numbers or bools; groups may differ in N.

    Returns:
        A matrix (N, columns) int64 for each group.
    """
    matrices = [np.stack(columns, axis=1, dtype=np.int64, casting="unsafe") for columns in groups]
    # The matrices before the last have an even number of columns, so that each begins at a multiple of 16 bytes: a
    # compiled kernel copies an input that does not.
    uploaded = upload(np.concatenate([matrix.ravel() for matrix in matrices]))
    flat_matrices = uploaded.split([matrix.size for matrix in matrices])
    return [flat.view(matrix.shape) for flat, matrix in zip(flat_matrices, matrices, strict=True)]
