# SPDX-License-Identifier: Apache-2.0
"""What is on its way from one step of a model runner to the next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ngrpo.rollout.tokens_left import TokensLeft


@dataclass(frozen=True)
class Batch:
    """The step in flight: which trajectory each row belongs to, and where its next token goes."""

    slots: np.ndarray
    next_positions: np.ndarray
    sampled: np.ndarray
    slot_tensor: Tensor
    prompts: Tensor


@dataclass(frozen=True)
class Edits:
    """Edits drawn in the last step, still on the device: row i is (slots[i], positions[i])."""

    slots: np.ndarray
    positions: np.ndarray
    vectors: Tensor
    fed: Tensor


@dataclass(frozen=True)
class Note:
    """What a step left for the trajectory store; on CUDA its tensors are still being copied to the host.

    Row ``rows[i]`` of the batch (i, where that is None) drew the token at ``slots[i]``, ``positions[i]``; edit j is of
    the slot and position ``edited[0][j]`` and ``edited[1][j]``.
    """

    ready: torch.cuda.Event | None
    slots: np.ndarray
    positions: np.ndarray
    rows: np.ndarray | None
    log_probs: Tensor
    left: TokensLeft | None
    edited: tuple[np.ndarray, np.ndarray]
    edits: dict[str, Tensor]
