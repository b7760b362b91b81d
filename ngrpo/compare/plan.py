"""What a comparison consists of: arms (a strategy with its flags) times seeds, all else equal."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BASELINE = "none"
_OPTION = "perturbation."


@dataclass(frozen=True)
class Arm:
    """One strategy as it is trained.

    Attributes:
        id: short and unique: ``none``, ``neighbor rate=0.2 base=gspo``.
        spec: the perturbation, every option spelt out; None where nothing is perturbed.
        base: the preset of the base algorithm (``grpo``, ``gspo``, ``dapo``), or None for the flags as given.
        settings: what sets it apart, ``{"perturbation.rate": "0.2", "base": "gspo"}``.
        flags: words for ``ngrpo train`` that belong to this arm alone.
        paper: where the operator comes from.
    """

    id: str
    spec: Mapping[str, Any] | None
    base: str | None
    settings: Mapping[str, str]
    flags: tuple[str, ...]
    paper: str = ""

    @property
    def perturbation(self) -> str:
        """The perturbation alone, as a line of ``ngrpo diagnose --strategy``."""
        options = [f"{k[len(_OPTION) :]}={v}" for k, v in self.settings.items() if k.startswith(_OPTION)]
        return shlex.join([self.flags[1], *options])

    @property
    def perturbation_flags(self) -> list[str]:
        """The perturbation alone, as flags."""
        options = [(f"--{k}", v) for k, v in self.settings.items() if k.startswith(_OPTION)]
        return ["--perturbation", self.flags[1], *(word for pair in options for word in pair)]


@dataclass(frozen=True)
class Run:
    """One arm with one seed; ``id`` is also the name of its folder."""

    id: str
    arm: Arm
    seed: int


@dataclass(frozen=True)
class Evaluation:
    """How every trained model is evaluated: the words for ``ngrpo eval`` but model, output and seed."""

    words: tuple[str, ...]
    n: int


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
        evaluation: None where there is nothing to evaluate on.
        diagnosis: words for ``ngrpo diagnose``, or None.
    """

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    baseline: str
    shared: tuple[str, ...]
    model: str
    task: str
    evaluation: Evaluation | None = None
    diagnosis: tuple[str, ...] | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    def runs(self) -> list[Run]:
        """Seed by seed, so that a comparison cut short has whole seeds."""
        return [Run(f"{_file_name(arm.id)}-seed{seed}", arm, seed) for seed in self.seeds for arm in self.arms]

    def common(self) -> dict[str, Any]:
        """What all runs of one folder must share; arms and seeds may be added later."""
        evaluation = None if self.evaluation is None else list(self.evaluation.words)
        return {"model": self.model, "task": self.task, "shared": list(self.shared), "evaluation": evaluation}


def _file_name(label: str) -> str:
    """A folder's name for an arm; labels that differ only in odd characters stay apart by a hash."""
    plain = re.sub(r"[^\w.=+-]+", "-", label).strip("-")
    if plain == label.replace(" ", "-") and len(plain) <= 80:
        return plain
    return f"{plain[:80]}-{hashlib.sha256(label.encode()).hexdigest()[:6]}"


def fingerprint(words: Any) -> str:
    """A short hash of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:16]
