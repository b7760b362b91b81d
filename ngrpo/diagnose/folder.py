"""The output folder: finished strategies are kept, whatever happens to the ones after them.

``samples.jsonl`` grows by one strategy at a time; only then does ``state.json`` name the strategy as finished. Lines
of a strategy that is not named there are what an interrupted run left, and are dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ngrpo.diagnose.sample import Sample

_LOCK = ".lock"
STATE, SAMPLES, DIAGNOSIS, REPORT = "state.json", "samples.jsonl", "diagnosis.json", "diagnosis.html"


class Folder:
    """An open output folder; see :func:`opened`."""

    def __init__(self, path: Path, state: dict[str, Any]) -> None:
        self.path, self._state = path, state

    @property
    def finished(self) -> dict[str, dict[str, Any]]:
        """What the engine told of each finished strategy, by id; with its ``perturbation`` and ``seconds``."""
        return self._state["finished"]

    @property
    def embedding_map(self) -> dict[str, Any] | None:
        """The embedding map as last made: ``{"wish": …, "map": …}``."""
        return self._state["embedding_map"]

    def samples(self, strategy: str) -> list[Sample]:
        """The samples of a finished strategy."""
        return [Sample.from_json(line) for line in self._lines() if line["strategy"] == strategy]

    def keep(self, strategy: str, samples: Sequence[Sample], facts: dict[str, Any]) -> None:
        """Adds a finished strategy."""
        with _told(self.path), (self.path / SAMPLES).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(sample.to_json(), ensure_ascii=False) + "\n" for sample in samples)
            file.flush()
            os.fsync(file.fileno())
        self._save({**self._state, "finished": {**self.finished, strategy: facts}})

    def keep_embedding_map(self, wish: dict[str, Any], found: dict[str, Any]) -> None:
        """Keeps the embedding map and what it was asked for."""
        self._save({**self._state, "embedding_map": {"wish": wish, "map": found}})

    def begin(self) -> None:
        """Writes the state, and removes the lines of strategies that were not finished."""
        self._save(self._state)
        place = self.path / SAMPLES
        if place.is_file():
            kept = (line for line in self._lines() if line["strategy"] in self.finished)
            self.write(SAMPLES, (json.dumps(line, ensure_ascii=False) + "\n" for line in kept))

    def write(self, name: str, lines: Iterable[str]) -> None:
        """Writes a file of the folder whole or not at all."""
        place, draft = self.path / name, self.path / f".{name}.draft"
        with _told(self.path):
            try:
                with draft.open("w", encoding="utf-8") as file:
                    file.writelines(lines)
                    file.flush()
                    os.fsync(file.fileno())
                draft.replace(place)
            finally:
                draft.unlink(missing_ok=True)

    def _save(self, state: dict[str, Any]) -> None:
        self.write(STATE, [json.dumps(state, indent=1, ensure_ascii=False) + "\n"])
        self._state = state

    def _lines(self) -> Iterator[dict[str, Any]]:
        with (self.path / SAMPLES).open(encoding="utf-8") as file:
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError:
                    continue  # cut by a full disk or a kill: its strategy is not among the finished ones


@contextmanager
def opened(path: Path, settings: dict[str, Any]) -> Iterator[Folder]:
    """Opens a folder, new or begun, for this process alone.

    Args:
        path: the folder; made if missing.
        settings: everything that the samples depend on but the strategies, as JSON values.

    Raises:
        ValueError: where another run is at work there, it holds something else, the settings are others, or writing
            fails.
    """
    import fcntl

    with _told(path):
        path.mkdir(parents=True, exist_ok=True)
        if not (path / STATE).exists() and any(entry.name != _LOCK for entry in path.iterdir()):
            raise ValueError(f"--out {path}: the folder holds something else. Give a new one.")
        lock = (path / _LOCK).open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--out {path}: another run is at work there. Wait for it, or give another.") from None
        folder = Folder(path, _state(path, settings))
        folder.begin()
        yield folder


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """A full disk or a folder that may not be written is the user's to mend."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--out {path}: {error.strerror or error}. What was finished is kept: make room or give another folder,"
            " then run the same command again."
        ) from error


def _state(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    place = path / STATE
    if not place.exists():
        return {"format": 1, "settings": settings, "finished": {}, "embedding_map": None}
    try:
        state = json.loads(place.read_text(encoding="utf-8"))
        before = state["settings"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"--out {path}: {STATE} is not one of ngrpo diagnose. Give a new folder.") from None
    differ = [name for name in settings if before.get(name) != settings[name]]
    if differ:
        told = "; ".join(f"{name} was {before.get(name)!r}, now {settings[name]!r}" for name in differ)
        raise ValueError(f"--out {path} was begun with other settings ({told}). Give a new folder, or these settings.")
    return state
