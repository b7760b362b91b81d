# SPDX-License-Identifier: Apache-2.0
"""Rows of a forward whose input is replaced, without a perturber."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ngrpo.rollout.input_override import PLAIN, InputOverride


def replace_rows(override: InputOverride, rows: Sequence[int], vectors: Tensor) -> None:
    """Feeds vectors (N, D) at N rows of the next forward."""
    sources = np.full(max(rows) + 1, PLAIN, dtype=np.int32)
    sources[list(rows)] = override.sources_of_stored(np.array(rows))
    override.place_stored(torch.tensor(rows), vectors)
    override.lay_out(sources, torch.from_numpy)
