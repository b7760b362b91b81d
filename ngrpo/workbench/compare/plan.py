# SPDX-License-Identifier: Apache-2.0
"""What a comparison consists of: arms times seeds, all else equal."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from ngrpo.config.arms import Arm

BASELINE = "none"  # the perturbation


@dataclass(frozen=True)
class Run:
    """One arm with one seed; ``id`` is also the name of its folder."""

    id: str
    arm: Arm
    seed: int


@dataclass(frozen=True)
class Plan:
    """A comparison.

    Attributes:
        arms: in the order given; each has every seed.
        seeds: OpenRLHF's ``--train.seed``: data order, draws and noise.
        baseline: the id of the arm that the others are held against.
        shared: words for ``ngrpo train`` that all runs have.
        model: the model before training.
        task: task or dataset, for people.
        reproducible: whether a run with the same seed repeats its rollouts.
        keep_models: whether a run's trained model stays once it has been evaluated.
        evaluation: words for ``ngrpo eval`` but model and folder, the same for every trained model; None where there
            is nothing to evaluate on.
        diagnosis: words for ``ngrpo diagnose``, or None.
        threshold: the score above which the report counts each strategy's runs, or None.
    """

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    baseline: str
    shared: tuple[str, ...]
    model: str
    task: str
    reproducible: bool = True
    keep_models: bool = True
    evaluation: tuple[str, ...] | None = None
    diagnosis: tuple[str, ...] | None = None
    threshold: float | None = None

    def runs(self) -> list[Run]:
        """Seed by seed, so that a comparison cut short has whole seeds."""
        return [Run(f"{_file_name(arm.id)}-seed{seed}", arm, seed) for seed in self.seeds for arm in self.arms]

    def common(self) -> dict[str, Any]:
        """What all runs of one folder must share; arms and seeds may be added later."""
        evaluation = self.evaluation and list(self.evaluation)
        return {
            "model": self.model,
            "task": self.task,
            "shared": list(self.shared),
            "evaluation": evaluation,
            "reproducible": self.reproducible,
        }


def _file_name(label: str) -> str:
    """A folder's name for an arm; labels that differ only in odd characters stay apart by a hash."""
    plain = re.sub(r"[^\w.=+-]+", "-", label).strip("-")
    if plain == label.replace(" ", "-") and len(plain) <= 80:
        return plain
    return f"{plain[:80]}-{hashlib.sha256(label.encode()).hexdigest()[:6]}"
