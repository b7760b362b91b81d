# SPDX-License-Identifier: Apache-2.0
"""Two rollouts of the same trajectories are compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perturbations import ReplayRecord
from tests.stack.harness import Rollout


def by_token(record: ReplayRecord) -> np.ndarray:
    return np.take_along_axis(record.weights, np.argsort(record.ids, axis=-1), axis=-1)


def assert_same(first: Sequence[Rollout], second: Sequence[Rollout]) -> None:
    """Gates and noise bit for bit, tokens and weights up to float rounding.

    A token may flip where a draw falls within rounding of a boundary; what follows it is another trajectory. So the
    records are compared up to the first difference, and almost no trajectory may have one.
    """
    flips = 0
    for a, b in zip(first, second):
        assert a.record.seed == b.record.seed
        same = np.array(a.sequence) == np.array(b.sequence)
        length = len(same) if same.all() else int(same.argmin())
        flips += not same.all()
        left, right = a.record.truncate(length), b.record.truncate(length)
        np.testing.assert_array_equal(left.positions, right.positions)
        # By token: two candidates with near-equal logits may swap places.
        np.testing.assert_array_equal(np.sort(left.ids), np.sort(right.ids))
        np.testing.assert_allclose(by_token(left), by_token(right), atol=2e-4)
        if left.sigma is not None:
            np.testing.assert_array_equal(left.sigma, right.sigma)
    assert flips <= len(first) // 8
