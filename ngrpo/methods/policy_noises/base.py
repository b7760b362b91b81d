# SPDX-License-Identifier: Apache-2.0
"""The contract of a policy noise."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ngrpo.machine.upstream.openrlhf_flags import Default, Flags
from ngrpo.methods.policy_noises import registry as _registry
from perturbations.errors import UsageError
from perturbations.options import Options, option
from perturbations.seeds import trajectory_seed


@dataclass(frozen=True, kw_only=True)
class PolicyNoise(Options, ABC):
    """A policy noise with its options. Subclasses are frozen dataclasses with fields from ``option``."""

    kind: ClassVar[str] = "policy noise"
    registry: ClassVar[Any] = _registry
    paper: ClassVar[str] = "none named"
    # The parameters that get noise, in words, for the error of a model that has none of them.
    noised: ClassVar[str] = "the parameters that its method selects() names"

    seed: int = option(0, "seed of the noise")

    @abstractmethod
    def selects(self, name: str) -> bool:
        """Whether a parameter gets noise, by its name in the Hugging Face model."""

    def selected(self, names: Iterable[str]) -> tuple[str, ...]:
        """The parameters, among all of a model's, that get noise; ``UsageError`` where there is none."""
        names = tuple(names)
        chosen = tuple(name for name in names if self.selects(name))
        if not chosen:
            raise UsageError(
                f"--policy_noise {self.name}: the model's parameters ({', '.join(names[:4])}, …) are none of"
                f" {self.noised}. Use another --policy_noise ({', '.join(_registry.available())}, or a file of your"
                " own), another model, or leave it out."
            )
        return chosen

    @abstractmethod
    def scale(self, step: int, steps: int, last: float | None, divergence: float | None) -> float:
        """σ ≥ 0 of the weights that roll out for a training step; at 0 they are clean.

        Args:
            step: the training step, from 0 on.
            steps: the number of all steps.
            last: σ of the rollouts for the step before; None at the first step.
            divergence: the mean of log π_rollout − log π_trainer over the tokens of these rollouts, an estimate of the
                KL divergence; None at the first step, or without log-probabilities.
        """

    @property
    def follows_divergence(self) -> bool:
        """Whether :meth:`scale` needs the divergence, and so the rollouts' log-probabilities."""
        return False

    def flags(self, flags: Flags) -> dict[str, Default]:
        """Defaults of OpenRLHF's flags that belong to the method, in view of the others."""
        return {}

    @contextmanager
    def added(self, parameters: Mapping[str, Tensor], scale: float, sync: int) -> Iterator[None]:
        """Adds N(0, scale²) to each element of the selected parameters; afterwards all have the same bits as before.

        The noise is a function of seed, ``sync`` and parameter name: the same on every rank and in every engine.
        ``parameters``: all of the model's, by name. ``sync``: the training step that the weights are sent for.
        """
        if not (math.isfinite(scale) and scale >= 0.0):
            raise UsageError(f"--policy_noise {self.name}: scale() gives σ = {scale}; must be finite, and 0 or above.")
        chosen = {name: parameters[name] for name in self.selected(parameters)}
        if scale == 0.0:
            yield
            return
        clean_values = {name: parameter.detach().clone() for name, parameter in chosen.items()}
        try:
            for name, parameter in chosen.items():
                seed = trajectory_seed("policy noise", self.seed, sync, name)
                generator = torch.Generator(parameter.device).manual_seed(seed)
                noise = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=torch.float32)
                parameter.data.copy_(clean_values[name].float() + scale * noise)
            yield
        finally:
            # Copied back and not subtracted, which would round.
            for name, parameter in chosen.items():
                parameter.data.copy_(clean_values[name])
