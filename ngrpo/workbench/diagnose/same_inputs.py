# SPDX-License-Identifier: Apache-2.0
"""Whether the answers of a group differ in their text alone: what is drawn then changes nothing that follows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ngrpo.workbench.diagnose.sample import Sample

# Rows of one batch round differently.
_WEIGHTS_APART = 1e-3


def fed_the_same(group: Sequence[Sample]) -> bool:
    """Whether all answers of a group were fed the same inputs, position by position, though their texts differ.

    Compared as far as the shorter of two answers was fed: not its last token. Noise of different seeds is different.
    """
    first, *others = group
    texts_differ = any(_fed(first, other) != _fed(other, first) for other in others)
    return texts_differ and all(_alike(first, other) for other in others)


def _fed(sample: Sample, other: Sample) -> list[int]:
    return sample.tokens[: min(len(sample.tokens), len(other.tokens)) - 1]


def _alike(one: Sample, other: Sample) -> bool:
    rows = [{place: row for row, place in enumerate(sample.perturbed)} for sample in (one, other)]
    for place, tokens in enumerate(zip(_fed(one, other), _fed(other, one))):
        here = [places.get(place) for places in rows]
        if here == [None, None]:
            if tokens[0] != tokens[1]:
                return False
        elif None in here or not _same_edit(one, other, *here):
            return False
    return True


def _same_edit(one: Sample, other: Sample, row: int | None, other_row: int | None) -> bool:
    a, b = one.record, other.record
    if a is None or b is None or any(part is not None for part in (a.sigma, b.sigma, a.vectors, b.vectors)):
        return False
    same_ids = np.array_equal(a.ids[row], b.ids[other_row])
    return same_ids and np.allclose(a.weights[row], b.weights[other_row], rtol=0, atol=_WEIGHTS_APART)
