"""The folder of an evaluation: settings, problems, every sample, and the result. What is written stays."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ngrpo.evaluate.problem import Problem

SETTINGS, PROBLEMS, SAMPLES, RESULT = "settings.json", "problems.jsonl", "samples.jsonl", "evaluation.json"
_KEYS = {"problem", "sample", "text"}

Sample = dict[str, Any]


class SampleStore:
    """One evaluation's folder, held by one process at a time."""

    def __init__(self, folder: Path, report: Callable[[str], None] = lambda line: None) -> None:
        """
        Args:
            folder: made if missing.
            report: called with a line about what was repaired.

        Raises:
            ValueError: where the folder cannot be written, or another process writes there.
        """
        self.folder, self._report = folder, report
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Unbuffered: what cannot be written must not be tried again when the file is closed.
            self._file = (folder / SAMPLES).open("a+b", buffering=0)
        except OSError as error:
            raise ValueError(_cannot(folder, error)) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ValueError(
                f"{folder}: another evaluation is writing there. Wait for it, or give another --out."
            ) from None

    def __enter__(self) -> SampleStore:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def begin(self, settings: dict[str, Any], problems: Sequence[Problem]) -> list[Sample]:
        """Starts an evaluation, or goes on with the one that is here.

        Args:
            settings: everything that decides the samples.
            problems: in order.

        Returns:
            The samples that are already here.

        Raises:
            ValueError: where the folder holds an evaluation with other settings.
        """
        place = self.folder / SETTINGS
        samples = self.samples()
        if place.is_file():
            held = self.settings()
            other = [key for key in {**held, **settings} if held.get(key) != settings.get(key)]
            if other:
                listed = "; ".join(f"{key}: {held.get(key)!r} there, {settings.get(key)!r} here" for key in other)
                raise ValueError(
                    f"{self.folder} holds another evaluation ({listed}). Give another --out, or the same settings to"
                    " go on with it."
                )
        elif samples:
            raise ValueError(f"{self.folder} holds {SAMPLES} without {SETTINGS}. Give another --out.")
        else:
            self.write(PROBLEMS, [asdict(problem) for problem in problems])
            self.write(SETTINGS, settings)
        return samples

    def settings(self) -> dict[str, Any]:
        """What :meth:`begin` was given."""
        place = self.folder / SETTINGS
        try:
            return json.loads(place.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{place}: cannot be read ({error}). Is this the folder of an evaluation?") from None

    def problems(self) -> list[Problem]:
        """The problems, in order."""
        place = self.folder / PROBLEMS
        try:
            rows = [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()]
            return [Problem(**{**row, "messages": tuple(row["messages"])}) for row in rows]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{place}: cannot be read ({error}). Is this the folder of an evaluation?") from None

    def samples(self) -> list[Sample]:
        """The samples so far. A line that a killed run left half written is cut off; anything else is kept.

        Raises:
            ValueError: for a damaged line that is not the last.
        """
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._report(f"{self.folder / SAMPLES}: the last line was cut off half-way; that sample is drawn again")
            os.ftruncate(self._file.fileno(), len(whole))
        found: dict[tuple[str, int], Sample] = {}
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict) or not row.keys() >= _KEYS:
                raise ValueError(f"{self.folder / SAMPLES}: line {number} is damaged. Mend or delete that line.")
            found.setdefault((row["problem"], row["sample"]), row)
        return list(found.values())

    def append(self, samples: Sequence[Sample]) -> None:
        """Adds samples and hands them to the system.

        Raises:
            ValueError: where there is no room; what was written before is kept.
        """
        data = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples).encode()
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise ValueError(_cannot(self.folder / SAMPLES, error)) from None

    def write(self, name: str, content: dict[str, Any] | Sequence[Any]) -> None:
        """Writes a file whole or not at all: an object as JSON, a sequence as JSON lines.

        Raises:
            ValueError: where it cannot be written; the file that was there is kept.
        """
        if isinstance(content, dict):
            text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        else:
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        place = self.folder / name
        draft = place.with_name(f".{name}.part")
        try:
            with draft.open("wb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            draft.replace(place)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise ValueError(_cannot(place, error)) from None


def _cannot(place: Path, error: OSError) -> str:
    return (
        f"{place}: cannot be written ({error.strerror or error}). What is there is kept: free some space or give the"
        " folder write permission, then run the same command again; it goes on where it stopped."
    )
