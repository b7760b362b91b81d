"""A comparison's folder: one comparison at a time, what has finished is kept, nothing half-written is read."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ngrpo.compare.plan import Plan, Run

_PLAN, _LOCK, _RUN = "comparison.json", ".lock", "run.json"
_FORMAT = 1


class DiskFull(RuntimeError):
    """No room is left; what has finished is kept."""


class Folder:
    """Reads and writes a comparison's folder.

    ``comparison.json`` holds what all runs share, ``runs/<id>/run.json`` how a run ended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Holds the folder while the block runs; gives the lock's file descriptor, which child processes may keep.

        Raises:
            ValueError: where another comparison is at work in it, or the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ValueError(f"--out {self.path}: cannot be written ({error.strerror}). Give another folder.") from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                raise ValueError(
                    f"--out {self.path}: another comparison (process {holder}, or a run that it started) is at work"
                    " in this folder. Wait for it, stop it, or give another --out."
                ) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield descriptor
        finally:
            os.close(descriptor)

    def claim(self, plan: Plan) -> None:
        """Writes the plan into a new folder, or checks that the folder's runs can stand beside this plan's.

        Raises:
            ValueError: where the folder holds a comparison with other shared settings.
        """
        place, common = self.path / _PLAN, plan.common()
        if place.is_file():
            try:
                earlier = json.loads(place.read_text(encoding="utf-8"))["common"]
            except (ValueError, KeyError) as error:
                raise ValueError(f"{place} is not a comparison's plan ({error}). Give another --out.") from None
            for key in common:
                if earlier.get(key) != common[key]:
                    raise ValueError(
                        f"--out {self.path} holds another comparison: its {key} is {_short(earlier.get(key))}, this one"
                        f" has {_short(common[key])}. Results of both would not be comparable. Give another --out, or"
                        " remove the folder."
                    )
        elif (self.path / "runs").exists() or (self.path / "results.json").exists():
            raise ValueError(f"--out {self.path} holds files that are no comparison's. Give another folder.")
        write_json(place, {"format": _FORMAT, "common": common})

    def run_folder(self, run: Run) -> Path:
        """Where a run writes."""
        return self.path / "runs" / run.id

    def status(self, run: Run, identity: str) -> dict[str, Any]:
        """How a run ended; ``pending`` where it has not, or was another run under the same name."""
        place = self.run_folder(run) / _RUN
        try:
            found = json.loads(place.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {"status": "pending"}
        return found if found.get("identity") == identity else {"status": "pending"}

    def finish(self, run: Run, record: Mapping[str, Any]) -> None:
        """Writes how a run ended."""
        write_json(self.run_folder(run) / _RUN, record)

    def fresh(self, run: Run) -> Path:
        """An empty folder for a run; what an interrupted one left is removed, for it cannot be trusted."""
        folder = self.run_folder(run)
        shutil.rmtree(folder, ignore_errors=True)
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def need(self, size: int) -> None:
        """Raises :class:`DiskFull` unless so many bytes are free."""
        free = shutil.disk_usage(self.path).free
        if free < size:
            raise DiskFull(
                f"{self.path}: {free / 2**30:.1f} GiB are free, the next run writes about {size / 2**30:.1f} GiB."
                " Make room, or move the folder, and repeat the command: finished runs are kept."
            )


@contextmanager
def disk_errors(place: Path) -> Iterator[None]:
    """Turns "no space left" into :class:`DiskFull`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"{place}: no space left on the disk. Make room and repeat the command: finished runs are kept."
            ) from None
        raise


def write_json(place: Path, value: Any) -> None:
    """Writes beside its place and renames, so that a reader sees the old file or the new one, whole."""
    write_text(place, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(place: Path, text: str) -> None:
    """As :func:`write_json`, for text."""
    draft = place.with_name(place.name + ".part")
    with disk_errors(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(place)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:197] + "..."
