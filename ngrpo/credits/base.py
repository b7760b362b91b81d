# SPDX-License-Identifier: Apache-2.0
"""The contract of a credit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ngrpo.credits import registry as _registry
from perturbations.options import Options


@dataclass(frozen=True, kw_only=True)
class Credit(Options, ABC):
    """A credit with its options. Subclasses are frozen dataclasses whose fields come from ``option``."""

    kind: ClassVar[str] = "credit"
    registry: ClassVar[Any] = _registry
    paper: ClassVar[str] = "none named"

    @abstractmethod
    def formula(self, advantages: Tensor, entropies: Tensor) -> Tensor:
        """The advantages that the tokens of one training step are trained with.

        Args:
            advantages: of all N generated tokens of the step, (N,) float32.
            entropies: of the policy where each was drawn, in nats, at the sampling temperature and over the perturbed
                history, (N,) float32. They have no gradient.

        Returns:
            (N,).
        """
