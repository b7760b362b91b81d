# SPDX-License-Identifier: Apache-2.0
"""The contract of a credit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ngrpo.credits import registry as _registry
from perturbations.options import Options


@dataclass(frozen=True)
class StepTokens:
    """The N generated tokens of one training step, answer by answer. Nothing here has a gradient.

    Attributes:
        advantages: of each one's answer, (N,) float32.
        entropies: of the policy where each was drawn, in nats, at the sampling temperature and over the perturbed
            history, (N,) float32.
        log_probs: of the policy before the step's updates, (N,) float32: each token's, or the density of the action
            where a perturbation has one.
        answers: which answer each belongs to, (N,) int64, from 0 on and ascending.
        groups: which prompt that answers, (N,) int64, from 0 on.
    """

    advantages: Tensor
    entropies: Tensor
    log_probs: Tensor
    answers: Tensor
    groups: Tensor

    @property
    def first(self) -> Tensor:
        """Whether each is the first one of its answer, (N,) bool."""
        return torch.cat([torch.ones_like(self.answers[:1], dtype=torch.bool), self.answers.diff() > 0])


@dataclass(frozen=True, kw_only=True)
class Credit(Options, ABC):
    """A credit with its options. Subclasses are frozen dataclasses whose fields come from ``option``."""

    kind: ClassVar[str] = "credit"
    registry: ClassVar[Any] = _registry
    paper: ClassVar[str] = "none named"
    keeps_sums: ClassVar[bool] = False
    """Whether each token keeps its answer's advantage or has none, whatever the advantages of its group are."""

    @abstractmethod
    def formula(self, tokens: StepTokens) -> Tensor:
        """The advantages that the tokens of one training step are trained with, (N,)."""
