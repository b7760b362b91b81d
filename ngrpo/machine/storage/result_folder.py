# SPDX-License-Identifier: Apache-2.0
"""Result folders of the workbench's commands: each belongs to one process at a time and to one set of settings.

Files are written whole or not at all; long work is appended as JSON lines, so that a stopped command resumes. Every
object and line has a checksum of the rest; one without a checksum, as an editor may leave it, is accepted.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from ngrpo.machine.console import Report
from perturbations.errors import UsageError

LOCK = ".lock"
SETTINGS = "settings.json"
_CHECKSUM = "checksum"

Opened = TypeVar("Opened", bound="ResultFolder")


class CannotWrite(UsageError):
    """There is no room or no permission to write; what was finished is kept."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path} cannot be written: {why}. What was finished is kept: make room, or give a folder that may be"
            " written, then run the same command again."
        )
        self.path = path
        self.why = why


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the system's refusal to write, such as a full disk, into :class:`CannotWrite`."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(path, error.strerror or str(error)) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns the system's refusal to read an existing file into ``UsageError``."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Make it readable, or give another.") from None


def write_text(path: Path, text: str) -> None:
    """Writes a file whole, or leaves the old one as it was; raises :class:`CannotWrite`."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path):
        try:
            with draft.open("wb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """As :func:`write_text`, for JSON; an object gets its checksum. The folder is made if it is missing."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(_sealed(value), indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file, or None where there is none; ``UsageError`` for a damaged file, which is kept."""
    why = "its checksum is not that of its content (if you edited it, remove the entry 'checksum' too)"
    try:
        with reading(path):
            value = json.loads(path.read_text(encoding="utf-8"))
        if _intact(value):
            return value
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        why = f"it is not JSON ({error})"
    raise UsageError(f"{path} is damaged: {why}. Restore it, or delete it to have it made again.")


class ResultFolder:
    """A folder that this process holds; see :meth:`opened`."""

    def __init__(self, path: Path, report: Report = lambda line: None) -> None:
        """``report`` is called with a line about each repair."""
        self.path = path
        self._report = report
        # The lock's file descriptor while the folder is held. Child processes may keep it, so that the folder stays
        # held until they end too. (A lock of the package filelock would hide the descriptor.)
        self.lock = -1

    @classmethod
    @contextmanager
    def opened(cls: type[Opened], path: Path, report: Report = lambda line: None) -> Iterator[Opened]:
        """Holds a folder, made if missing, while the block runs; ``UsageError`` where another process holds it."""
        folder = cls(path, report)
        if path.is_file():
            raise UsageError(f"{path}: is a file. Give a folder.")
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            folder.lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(folder.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                holder = os.pread(folder.lock, 32, 0).decode(errors="replace").strip() or "unknown"
                raise UsageError(
                    f"{path}: another command (process {holder}, or one that it started) is at work in this folder."
                    " Wait for it, stop it, or give another folder."
                ) from None
            except OSError as error:
                raise UsageError(
                    f"{path}: its file system cannot lock files ({error.strerror}). The lock keeps two commands out of"
                    " one folder. Give a folder on another file system, such as a local disk."
                ) from None
            with writing(path):
                os.ftruncate(folder.lock, 0)
                os.pwrite(folder.lock, str(os.getpid()).encode(), 0)
            yield folder
        finally:
            os.close(folder.lock)

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Writes the settings into a new folder; ``UsageError`` where it has others or holds something else."""
        written = self.read(SETTINGS)
        now = json.loads(json.dumps(settings))
        if written is None and all(entry.name.startswith(".") for entry in self.path.iterdir()):
            self.write(SETTINGS, now)
            return
        if not isinstance(written, dict):
            raise UsageError(f"{self.path} holds something else: it has no valid {SETTINGS}. Give another --out.")
        changes = [
            f"{key} was {_short(written.get(key))}, and is now {_short(now.get(key))}"
            for key in {**written, **now}
            if written.get(key) != now.get(key)
        ]
        if changes:
            raise UsageError(
                f"{self.path} was begun with other settings ({'; '.join(changes)}). Give another --out, or the same"
                " settings to go on there."
            )

    def read(self, name: str) -> Any:
        """See :func:`read_json`."""
        return read_json(self.path / name)

    def write(self, name: str, value: object) -> None:
        """See :func:`write_json`."""
        write_json(self.path / name, value)

    def lines(self, name: str, *keys: str, mend: bool = True) -> list[dict[str, Any]]:
        """The objects in a file of JSON lines, each with ``keys``; none where there is no such file.

        A last line that was cut off half-way, as a kill or a full disk leaves it, is dropped with a report, from the
        file too unless ``mend`` is False. Any other damaged line raises ``UsageError``.
        """
        path = self.path / name
        if not path.is_file():
            return []
        with reading(path):
            data = path.read_bytes()
        *whole_lines, tail = data.split(b"\n")
        if tail and _row(tail, keys) is not None:  # an editor left the last line's end out
            whole_lines.append(tail)
            if mend:
                with writing(path), path.open("ab") as file:
                    file.write(b"\n")
        elif tail:
            self._report(f"{path}: the last line was cut off half-way and is dropped")
            if mend:
                with writing(path):
                    os.truncate(path, len(data) - len(tail))
        rows = []
        for number, line in enumerate(whole_lines, start=1):
            row = _row(line, keys)
            if row is None:
                raise UsageError(
                    f"{path}: line {number} is damaged. Restore that line, or delete it to have it made again."
                )
            rows.append(row)
        return rows

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds lines to a file of JSON lines; when this returns they are on the disk."""
        path = self.path / name
        data = json_lines(map(_sealed, rows)).encode()
        # Unbuffered: what cannot be written must not be tried again when the file is closed.
        with writing(path), path.open("ab", buffering=0) as file:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())

    def write_lines(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replaces a whole file of JSON lines."""
        write_text(self.path / name, json_lines(map(_sealed, rows)))


def folder_for(path: str | None, name: str) -> Path:
    """The folder that the user gave, or a new one: ``runs/<time>-<name>``."""
    return Path(path or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{name}").expanduser()


def _made(first: Path) -> Path:
    """Makes the folder ``first``, or ``first-2``, … where the name is taken: two runs may start in one second."""
    folder = first
    numbers = count(2)
    while True:
        with writing(folder), suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
        folder = first.with_name(f"{first.name}-{next(numbers)}")


@contextmanager
def reserved_folder(path: str | None, name: str) -> Iterator[Path]:
    """Holds the folder that the user gave, or a new one: ``runs/<time>-<name>``, then ``…-2``.

    A folder that was made here is removed where the block fails before it has written a file, and its parent folder if
    that is then empty. Raises ``UsageError`` where another process holds the folder, or it cannot be made.
    """
    folder = folder_for(path, name)
    new = not path or not folder.exists()
    if not path:
        folder = _made(folder)
    with ResultFolder.opened(folder):
        try:
            yield folder
        except BaseException:
            if new and [entry.name for entry in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                folder.rmdir()
                with suppress(OSError):  # other runs are in it
                    folder.parent.rmdir()
            raise


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """The text of a file of JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _checksum(value: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def _sealed(value: object) -> Any:
    """An object with its checksum; other values as they are."""
    return {**value, _CHECKSUM: _checksum(value)} if isinstance(value, Mapping) else value


def _intact(value: object) -> bool:
    """Whether a value has the checksum of its content, or none; takes the checksum out."""
    if not isinstance(value, dict) or _CHECKSUM not in value:
        return True
    return value.pop(_CHECKSUM) == _checksum(value)


def _row(line: bytes, keys: Iterable[str]) -> dict[str, Any] | None:
    """The object of a line that is intact and has all keys; None for any other line."""
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        if isinstance(row, dict) and _intact(row) and row.keys() >= set(keys):
            return row
    return None


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:197] + "..."
