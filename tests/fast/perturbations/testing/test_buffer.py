# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of replay buffers: good ones pass, and each way of losing a trajectory is said in words."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perturbations import FinishedTrajectory, ReplayBuffer, option
from perturbations.registry import buffers
from perturbations.replay.buffers.memory import MemoryBuffer
from perturbations.testing import PerturbationError, check_buffer


@dataclass(frozen=True, kw_only=True)
class Good(ReplayBuffer):
    """The newest trajectories, in a dictionary."""

    name = "good"
    most: int = option(100, "trajectories held", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "held", {})

    def add(self, name: str, finished: FinishedTrajectory) -> None:
        self.held[name] = finished
        while len(self.held) > self.most:
            del self.held[next(iter(self.held))]

    def names(self) -> list[str]:
        return list(self.held)

    def take(self, name: str) -> FinishedTrajectory:
        return self.held.pop(name)


@dataclass(frozen=True, kw_only=True)
class AsBytes(Good):
    """Holds the bytes of trajectories, as a buffer on a disk does."""

    name = "as_bytes"

    def add(self, name: str, finished: FinishedTrajectory) -> None:
        super().add(name, finished.pack())

    def take(self, name: str) -> FinishedTrajectory:
        return FinishedTrajectory.unpack(super().take(name))


def test_every_buffer_conforms() -> None:
    for name in buffers.in_tree():
        check_buffer(name)
    check_buffer("memory", max_bytes=1)


@pytest.mark.parametrize("most", [1, 2, 100])
def test_a_third_partys_buffer_conforms(most: int) -> None:
    check_buffer(Good, most=most)
    check_buffer(AsBytes(most=most))


SHARED: dict[str, FinishedTrajectory] = {}


def without_log_probs(self: Good, name: str) -> FinishedTrajectory:
    finished = self.held.pop(name)
    return dataclasses.replace(finished, log_probs=finished.log_probs[1:])


def as_bytes(self: Good, name: str) -> Any:
    return self.held.pop(name).pack()


def the_oldest(self: Good, name: str) -> FinishedTrajectory:
    return self.held.pop(min(self.held, key=len)) if name in self.held else self.held.pop(name)


def still_held(self: Good, name: str) -> FinishedTrajectory:
    return self.held[name]


def none_if_missing(self: Good, name: str) -> FinishedTrajectory | None:
    return self.held.pop(name, None)


def keeps_the_first(self: Good, name: str, finished: FinishedTrajectory) -> None:
    self.held.setdefault(name, finished)


def drops_the_newest(self: Good, name: str, finished: FinishedTrajectory) -> None:
    if len(self.held) < 2:
        self.held[name] = finished


def in_place(self: Good, name: str, finished: FinishedTrajectory) -> None:
    finished.log_probs[:] = 0.0
    self.held[name] = finished


def as_a_file(self: Good, name: str, finished: FinishedTrajectory) -> None:
    Path(f"/tmp/no-such-folder/{name}").write_bytes(b"")


def shared_by_all(self: Good) -> None:
    MemoryBuffer.__post_init__(self)
    object.__setattr__(self, "held", SHARED)


def cannot_drop(self: Good, names: Iterable[str]) -> None:
    for name in names:
        self.take(name)


BROKEN = [
    ("take", without_log_probs, "another trajectory than add() was given, by its perturbation_log_probs."),
    ("take", as_bytes, "gives a dict. It must be a FinishedTrajectory: FinishedTrajectory.unpack("),
    ("take", the_oldest, "another trajectory than add() was given"),
    ("take", still_held, "after each was taken"),
    ("take", none_if_missing, "take() of a name whose second trajectory was taken gives a NoneType"),
    ("add", keeps_the_first, "another trajectory than add() was given"),
    ("add", drops_the_newest, "A buffer may drop trajectories, but not the newest."),
    ("add", in_place, "another trajectory than add() was given, by its perturbation_log_probs."),
    ("add", as_a_file, "It must accept any text as a name."),
    ("names", lambda self: tuple(self.held), "It must be a list of the names given to add()."),
    ("names", lambda self: sorted(self.held), "It must list what is held, oldest first."),
    ("drop", cannot_drop, "drop() raises KeyError"),
    ("drop", lambda self, names: None, "that was dropped"),
    ("__post_init__", shared_by_all, "Each tensor-parallel rank has a buffer with the same options"),
]


@pytest.mark.parametrize(("method", "broken", "message"), BROKEN)
def test_a_broken_buffer_is_refused(method: str, broken: object, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SHARED.clear()
    monkeypatch.setattr(Good, method, broken)
    with pytest.raises(PerturbationError) as error:
        check_buffer(Good)
    assert message in str(error.value)
