# SPDX-License-Identifier: Apache-2.0
"""Runs as tests write them, one of them as the current one of a test's process, and refused input."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import yaml

from ngrpo.config import compatibility, complete_run, run
from ngrpo.config.complete_run import CompleteRun
from ngrpo.config.feature_kinds import Combination
from ngrpo.config.kinds import KINDS
from ngrpo.config.run import RunConfig, Sampling
from ngrpo.machine.upstream.openrlhf_flags import Flags
from tests.conftest import ROOT


def refused(section: str) -> list[list[Any]]:
    """Rows of tests/data/refused.yaml: an input, and parts of its message."""
    return yaml.safe_load((ROOT / "tests/data/refused.yaml").read_text(encoding="utf-8"))[section]


def run_of(*, sampling: Mapping[str, Any] | None = None, **values: Any) -> RunConfig:
    """A run with specs by their kind's name, its sampling's options, and further attributes."""
    specs = {name: spec for name, spec in values.items() if name in KINDS and spec is not None}
    attributes = {name: value for name, value in values.items() if name not in KINDS}
    return RunConfig(specs=specs, sampling=Sampling(**(sampling or {})), **attributes)


def run_with(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    """Makes ``run_of(**values)`` the current run until the test ends."""
    monkeypatch.setattr(run, "_current", run_of(**values))


def clip_range(words: str, advantage: Mapping[str, Any], **parts: Any) -> Any:
    """The clip of advantages that a run adds to OpenRLHF's flags; None for OpenRLHF's own, 10."""
    run = run_of(advantage=advantage, **parts)
    defaults = complete_run.of_preset(CompleteRun(run=run, flags=Flags(words.split())))
    return defaults.get("--reward.clip_range")


def check_flags(words: Sequence[str], asked: RunConfig) -> None:
    """The rules on OpenRLHF's flags as they are given, and as the methods complete them."""
    complete_run.make_algorithm(replace(asked, openrlhf=tuple(words)))


def check_pairs(words: Sequence[str], asked: RunConfig, **known: Any) -> None:
    """The table of what does not go with what, on OpenRLHF's flags as they are given here."""
    rows = compatibility.HARDWARE if known else compatibility.TRAINING
    compatibility.check(rows, Combination(run=asked, flags=Flags(words), **known))
