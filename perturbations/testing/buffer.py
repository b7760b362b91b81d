# SPDX-License-Identifier: Apache-2.0
"""Checks of a replay buffer: trajectories come out under their names, as they went in, and once."""

import dataclasses

import numpy as np

from perturbations import FinishedTrajectory, ReplayBuffer, ReplayRecord
from perturbations.replay.sampling_mask import SamplingMask
from perturbations.replay.trajectory import UnperturbedResponse
from perturbations.testing.report import PerturbationError, answered, expect

# Ids of requests. A client of `vllm serve` chooses its own, which may be no file's name.
_SHORT = "request-1"
_WITH_SLASHES = "chatcmpl-../7 ü"
_LONG = "x" * 300
_NEVER_ADDED = "request-2"
_ANY_NAME = "It must accept any text as a name."


def check_hands_over(buffer: ReplayBuffer) -> None:
    """Trajectories with everything that may be recorded, and with nothing, are handed over bit for bit."""
    buffer = dataclasses.replace(buffer)
    trajectories = {_SHORT: _trajectory(1), _WITH_SLASHES: _full_trajectory(), _LONG: _trajectory(0)}
    packed = {name: trajectory.pack() for name, trajectory in trajectories.items()}
    for name, trajectory in trajectories.items():
        _add(buffer, name, trajectory)
    names = _names(buffer)
    expect(
        names == [name for name in trajectories if name in names] and names[-1:] == [_LONG],
        f"{buffer.name}: names() gives {names!r:.200} after add() for {list(trajectories)!r:.200}.",
        "It must list what is held, oldest first. A buffer may drop trajectories, but not the newest.",
    )
    for name in reversed(names):
        _check_take(buffer, name, packed[name])
    _check_empty(buffer, "after each was taken", "take() must forget the name.")


def check_replaces(buffer: ReplayBuffer) -> None:
    """The second trajectory of a name takes the place of the first."""
    buffer = dataclasses.replace(buffer)
    second = _trajectory(3)
    _add(buffer, _SHORT, _trajectory(1))
    _add(buffer, _SHORT, second)
    names = _names(buffer)
    expect(
        names == [_SHORT],
        f"{buffer.name}: names() gives {names!r:.200} after two trajectories of the name {_SHORT!r}.",
        "The second one replaces the first.",
    )
    _check_take(buffer, _SHORT, second.pack())
    _check_gone(buffer, _SHORT, "whose second trajectory was taken")


def check_forgets(buffer: ReplayBuffer) -> None:
    """A name that is not held is a ``KeyError`` for ``take`` and nothing for ``drop``."""
    buffer = dataclasses.replace(buffer)
    _check_gone(buffer, _NEVER_ADDED, "that was never added")
    _add(buffer, _SHORT, _trajectory(2))
    answered(
        f"{buffer.name}: drop()",
        lambda: buffer.drop([_NEVER_ADDED, _SHORT, _SHORT]),
        "It must pass over names that are not held.",
    )
    _check_gone(buffer, _SHORT, "that was dropped")
    _check_empty(buffer, "after drop()", "drop() must forget the names.")


def check_separate(buffer: ReplayBuffer) -> None:
    """Two buffers with the same options hold nothing in common, as those of two tensor-parallel ranks."""
    one = dataclasses.replace(buffer)
    other = dataclasses.replace(buffer)
    _add(one, _SHORT, _trajectory(2))
    _check_empty(
        other,
        "that was added to another buffer",
        "Each tensor-parallel rank has a buffer with the same options: make its store in __post_init__, and on a disk"
        " in a folder of its own, such as tempfile.mkdtemp() gives.",
    )
    one.drop([_SHORT])


def _add(buffer: ReplayBuffer, name: str, trajectory: FinishedTrajectory) -> None:
    answered(f"{buffer.name}: add({name[:40]!r}, …)", lambda: buffer.add(name, trajectory), _ANY_NAME)


def _names(buffer: ReplayBuffer) -> list[str]:
    """The names that are held, which must be a list of texts."""
    names = answered(f"{buffer.name}: names()", buffer.names, "It must list what is held.")
    expect(
        isinstance(names, list) and all(isinstance(name, str) for name in names),
        f"{buffer.name}: names() gives {names!r:.200}.",
        "It must be a list of the names given to add().",
    )
    return names


def _check_empty(buffer: ReplayBuffer, when: str, fix: str) -> None:
    """Nothing is held; ``when`` ends the sentence about names that are, for which ``fix`` is the remedy."""
    names = _names(buffer)
    expect(not names, f"{buffer.name}: names() gives {names!r:.200} {when}.", fix)


def _check_take(buffer: ReplayBuffer, name: str, expected: dict[str, bytes]) -> None:
    """The trajectory of a name is that which was added, by its bytes."""
    where = f"{buffer.name}: take({name[:40]!r})"
    trajectory = answered(where, lambda: buffer.take(name), "It must hand over what add() was given.")
    expect(
        isinstance(trajectory, FinishedTrajectory),
        f"{where} gives a {type(trajectory).__name__}.",
        "It must be a FinishedTrajectory: FinishedTrajectory.unpack(finished.pack()) reads one from bytes.",
    )
    packed = trajectory.pack()
    different = [part for part in {**expected, **packed} if expected.get(part) != packed.get(part)]
    expect(
        not different,
        f"{where} gives another trajectory than add() was given, by its {' and '.join(different)}.",
        "It must hand over the trajectory unchanged: the trainer replays it bit for bit.",
    )


def _check_gone(buffer: ReplayBuffer, name: str, why: str) -> None:
    """``take`` raises ``KeyError`` for a name."""
    what = f"{buffer.name}: take() of a name {why}"
    fix = "It must raise KeyError: the rollout then looks elsewhere."
    try:
        trajectory = buffer.take(name)
    except KeyError:
        return
    except Exception as error:
        raise PerturbationError(f"{what} raises {type(error).__name__}: {error}.", fix) from error
    raise PerturbationError(f"{what} gives a {type(trajectory).__name__}.", fix)


def _trajectory(perturbed: int) -> FinishedTrajectory:
    """A trajectory of ten generated tokens, of which the first ``perturbed`` were fed as mixtures of two."""
    generator = np.random.default_rng(perturbed)
    record = ReplayRecord(
        seed=2**47 + perturbed,
        prompt_tokens=300,
        num_tokens=310,
        positions=300 + np.arange(perturbed, dtype=np.int32),
        ids=generator.integers(0, 150_000, (perturbed, 2)).astype(np.int32),
        weights=generator.random((perturbed, 2), np.float32),
        sigma=None,
        agreed=np.arange(perturbed) % 2 == 0,
    )
    return FinishedTrajectory(record, log_probs=-generator.random(10, np.float32))


def _full_trajectory() -> FinishedTrajectory:
    """A trajectory with a value in each field."""
    generator = np.random.default_rng(4)
    trajectory = _trajectory(3)
    record = dataclasses.replace(
        trajectory.record,
        sigma=generator.random(3, np.float32),
        vectors=generator.random((3, 8), np.float32),
        normalizer=generator.random(3, np.float32),
        model=77,
    )
    experts = generator.integers(0, 64, (310, 2, 4)).astype(np.uint8)
    response = UnperturbedResponse(
        tokens=np.arange(5, dtype=np.int32), log_probs=-generator.random(2, np.float32), experts=experts[:5]
    )
    return dataclasses.replace(
        trajectory,
        record=record,
        sampling_mask=SamplingMask.of(64, {300: (False, np.array([3, 5])), 304: (True, np.array([0]))}),
        dropped=1,
        prompted=300,
        cached=16,
        unperturbed=response,
        experts=experts,
    )
