# SPDX-License-Identifier: Apache-2.0
"""Staleness: by how many weight syncs a response is older than the weights that train on it.

The version of an engine's weights is the number of weight syncs that it has completed. A response carries the version
that it was drawn with, and its age is the number of syncs that the trainer has made since then.
"""

from collections.abc import Sequence

import numpy as np

CLASSES = ("0", "1", "2_up")
"""The classes of ages in the metrics: 0, 1, and 2 or more syncs."""


def ages(versions: Sequence[int], trainer_version: int) -> np.ndarray:
    """The ages of responses, (N,) int64, in weight syncs.

    Args:
        versions: that the responses were drawn with.
        trainer_version: of the weights that train on them, the number of syncs that the trainer has made.

    Raises:
        RuntimeError: for a response of a later version, with which engine and trainer do not count the same syncs.
    """
    differences = trainer_version - np.asarray(versions, dtype=np.int64)
    if len(differences) and differences.min() < 0:
        raise RuntimeError(
            f"a response was drawn with the weights of sync {max(versions)}, and the trainer has made {trainer_version}"
            " syncs: engine and trainer do not count the same syncs, so no response's age is known."
        )
    return differences


def measures(
    ages_of_responses: np.ndarray, token_counts: np.ndarray, gaps: Sequence[np.ndarray] | None
) -> dict[str, float]:
    """The metrics ``staleness/…`` of a step (docs/metrics.md).

    Args:
        ages_of_responses: of the step's N responses, (N,).
        token_counts: of their trained tokens, (N,).
        gaps: |log π_trainer − log π_rollout| of each response's trained tokens, before the update; None if unknown.
    """
    metrics = {
        "mean": float((ages_of_responses * token_counts).sum() / token_counts.sum()),
        "max": float(ages_of_responses.max()),
    }
    class_of_response = np.minimum(ages_of_responses, len(CLASSES) - 1)
    for number, name in enumerate(CLASSES):
        in_class = class_of_response == number
        metrics[f"tokens_{name}"] = float(token_counts[in_class].sum())
        if gaps is not None:
            gaps_of_class = np.concatenate([np.zeros(0), *(gaps[row] for row in np.flatnonzero(in_class))])
            if len(gaps_of_class):
                metrics[f"gap_{name}"] = float(gaps_of_class.mean())
    return {f"staleness/{name}": value for name, value in metrics.items()}
