# SPDX-License-Identifier: Apache-2.0
"""What a run was asked to do, beyond OpenRLHF's own flags: one object, the same in all of its processes.

`ngrpo.trainer.launch` writes it into the environment of the driver and of every Ray worker; :func:`current_run` reads
it back, once per process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ngrpo.advantages.base import Advantage
    from ngrpo.credits.base import Credit
    from ngrpo.policy_noises.base import PolicyNoise
    from ngrpo.sampling_schedules.base import SamplingSchedule
    from perturbations.base import Perturbation

# One variable for each setting: Linux limits one to 131,072 bytes, and a spec may carry the text of a user's file.
_VARIABLES = {
    "perturbation_spec": "NGRPO_PERTURBATION",
    "advantage_spec": "NGRPO_ADVANTAGE",
    "credit_spec": "NGRPO_CREDIT",
    "policy_noise_spec": "NGRPO_POLICY_NOISE",
    "sampling": "NGRPO_SAMPLING",
    "sampling_schedule_spec": "NGRPO_SAMPLING_SCHEDULE",
    "reproducible": "NGRPO_REPRODUCIBLE",
    "eval_at_start": "NGRPO_EVAL_AT_START",
    "gap_limit": "NGRPO_GAP_LIMIT",
    "strict": "NGRPO_STRICT",
    "replay_buffer_spec": "NGRPO_REPLAY_BUFFER",
    "report": "NGRPO_REPORT",
}


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of one run.

    Attributes:
        perturbation_spec: ``perturbations.create(**spec)``; None where nothing is perturbed.
        advantage_spec: as ``ngrpo.advantages.create`` takes it; None for OpenRLHF's own estimator.
        credit_spec: as ``ngrpo.credits.create`` takes it; None where all tokens of an answer have its advantage.
        policy_noise_spec: as ``ngrpo.policy_noises.create`` takes it; None where engines have the trainer's weights.
        sampling: ``ngrpo.trainer.rollout_sampling.create(**sampling)``, e.g. ``{"top_k": 5}``.
        sampling_schedule_spec: as ``ngrpo.sampling_schedules.create`` takes it; None for one temperature throughout.
        reproducible: whether the same seed gives the same rollouts from run to run.
        eval_at_start: whether the model is evaluated before its first training step as well.
        gap_limit: how many times the log-probability gap at plain positions the one after perturbed inputs may be.
        strict: whether a larger one ends the run.
        replay_buffer_spec: ``perturbations.registry.buffers.create(**spec)``, for each rollout worker; None for the one
            in its memory.
        report: what is kept for the run's report: ``groups``, of how many prompts of a step, and the ``folder``.
    """

    perturbation_spec: Mapping[str, Any] | None = None
    advantage_spec: Mapping[str, Any] | None = None
    credit_spec: Mapping[str, Any] | None = None
    policy_noise_spec: Mapping[str, Any] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    sampling_schedule_spec: Mapping[str, Any] | None = None
    reproducible: bool = False
    eval_at_start: bool = False
    gap_limit: float = 10.0
    strict: bool = False
    replay_buffer_spec: Mapping[str, Any] | None = None
    report: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def perturbation(self) -> Perturbation | None:
        """The run's perturbation."""
        from perturbations import registry

        return None if self.perturbation_spec is None else registry.create(**self.perturbation_spec)

    @cached_property
    def advantage(self) -> Advantage | None:
        """The run's advantage."""
        from ngrpo import advantages

        return None if self.advantage_spec is None else advantages.create(**self.advantage_spec)

    @cached_property
    def credit(self) -> Credit | None:
        """The run's credit."""
        from ngrpo import credits

        return None if self.credit_spec is None else credits.create(**self.credit_spec)

    @cached_property
    def policy_noise(self) -> PolicyNoise | None:
        """The run's noise on the weights that roll out."""
        from ngrpo import policy_noises

        return None if self.policy_noise_spec is None else policy_noises.create(**self.policy_noise_spec)

    @cached_property
    def sampling_schedule(self) -> SamplingSchedule | None:
        """The run's schedule of temperatures."""
        from ngrpo import sampling_schedules

        spec = self.sampling_schedule_spec
        return None if spec is None else sampling_schedules.create(**spec)

    @property
    def corrects_sampling(self) -> bool:
        """Whether log-probabilities are those among the tokens that the rollout's sampling left."""
        return bool(self.sampling.get("correct_mask"))

    @property
    def conditions(self) -> tuple[str, ...]:
        """The conditions of `ngrpo.trainer.seams` that hold because of these settings."""
        held = {
            "perturbation": self.perturbation_spec is not None,
            "advantage": self.advantage_spec is not None,
            "credit": self.credit_spec is not None,
            "credit_in_loss": self.credit is not None and self.credit.acts_in_loss,
            "policy_noise": self.policy_noise_spec is not None,
            "sampling": bool(self.sampling),
            "sampling_schedule": self.sampling_schedule_spec is not None,
            "sampling_mask": self.corrects_sampling,
            "reproducible": self.reproducible,
            "eval_at_start": self.eval_at_start,
            "report_groups": bool(self.report.get("groups")),
        }
        return tuple(name for name, holds in held.items() if holds)

    def env(self) -> dict[str, str]:
        """The environment variables that :func:`current_run` reads; every one is set, so that none is left over."""
        return {name: json.dumps(getattr(self, key), sort_keys=True) for key, name in _VARIABLES.items()}


def current_run() -> RunSettings:
    """The settings of the run that this process belongs to; the defaults where no run has been launched."""
    return _read(tuple(os.environ.get(name) for name in _VARIABLES.values()))


@lru_cache(maxsize=1)
def _read(texts: tuple[str | None, ...]) -> RunSettings:
    given = {key: json.loads(text) for key, text in zip(_VARIABLES, texts) if text is not None}
    return RunSettings(**given)
