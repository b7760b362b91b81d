# SPDX-License-Identifier: Apache-2.0
"""A comparison's folder: ``runs/<id>/run.json`` says how each run ended."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ngrpo.machine.storage.result_folder import CannotWrite, ResultFolder, writing
from ngrpo.workbench.compare.plan import Run


class ComparisonFolder(ResultFolder):
    """The result folder of a comparison, with a folder for each run."""

    def run_folder(self, run: Run) -> Path:
        """Where a run writes."""
        return self.path / "runs" / run.id

    def status(self, run: Run, identity: str, *, evaluated: bool = False) -> dict[str, Any]:
        """How a run ended.

        Args:
            run: the run.
            identity: of the run as it is asked for now.
            evaluated: whether it is only finished with an evaluation.

        Returns:
            The content of ``run.json``. ``{"status": "pending"}`` where the run has not ended, or a file of its results
            is missing; ``{"status": "other"}`` where another one has finished under the same name.
        """
        record = self.read(f"runs/{run.id}/run.json") or {}
        done = record.get("status") == "done"
        if record.get("identity") != identity:
            return {"status": "other" if done else "pending"}
        needed = ["summary.json", *(["evaluation/evaluation.json"] if evaluated else [])]
        if done and not all((self.run_folder(run) / name).is_file() for name in needed):
            return {"status": "pending"}
        return record

    def finish(self, run: Run, record: Mapping[str, Any]) -> None:
        """Writes how a run ended."""
        self.write(f"runs/{run.id}/run.json", record)

    def fresh(self, run: Run) -> Path:
        """An empty folder for a run; what an interrupted one left is removed, for it cannot be trusted."""
        folder = self.run_folder(run)
        shutil.rmtree(folder, ignore_errors=True)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def need(self, size: int) -> None:
        """Raises :class:`ngrpo.machine.storage.result_folder.CannotWrite` unless so many bytes are free."""
        free = shutil.disk_usage(self.path).free
        if free < size:
            needed = f"{free / 2**30:.1f} GiB are free, and the next run writes about {size / 2**30:.1f} GiB"
            raise CannotWrite(self.path, needed)
