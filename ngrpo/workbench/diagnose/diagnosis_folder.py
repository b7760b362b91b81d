# SPDX-License-Identifier: Apache-2.0
"""The folder of a diagnosis: finished strategies are kept, whatever happens to the ones after them.

``samples.jsonl`` grows by one strategy at a time; only then does ``finished.jsonl`` name the strategy. Samples of a
strategy that is not named there are what an interrupted run left, and are dropped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ngrpo.config.arms import Arm
from ngrpo.machine.storage.result_folder import SETTINGS, ResultFolder
from ngrpo.workbench.diagnose.sample import GroupSampling, Sample
from ngrpo.workbench.scoring import Problem, digest
from perturbations.errors import UsageError

SAMPLES, FINISHED, MAP = "samples.jsonl", "finished.jsonl", "embedding_map.json"
DIAGNOSIS, REPORT = "diagnosis.json", "diagnosis.html"


def settings_of(
    model: str, dataset: str, problems: Sequence[Problem], sampling: GroupSampling, dtype: str
) -> dict[str, object]:
    """What all strategies of a folder share."""
    return {
        "model": model,
        "dataset": dataset,
        "problems": digest(problems),
        "sampling": asdict(sampling),
        "dtype": dtype,
    }


def map_settings_of(strategies: Sequence[Arm], words: str | None) -> dict[str, object]:
    """What an embedding map is made of."""
    return {"words": words, "specs": [strategy.spec for strategy in strategies]}


class DiagnosisFolder(ResultFolder):
    """The result folder of a diagnosis."""

    finished: dict[str, dict[str, Any]]
    """What the engine told of each finished strategy, by id; with its ``perturbation`` and ``seconds``."""

    def claim(self, settings: Mapping[str, Any]) -> None:
        """As :meth:`ResultFolder.claim`; removes the samples of strategies that are not finished, or not all here."""
        super().claim(settings)
        lines = self.lines(SAMPLES, "strategy", "tokens")
        counts = Counter(line["strategy"] for line in lines)
        rows = self.lines(FINISHED, "strategy", "samples", "perturbation")
        self.finished = {row.pop("strategy"): row for row in rows if row["samples"] == counts[row["strategy"]]}
        remaining = [line for line in lines if line["strategy"] in self.finished]
        if len(remaining) < len(lines):
            self.write_lines(SAMPLES, remaining)

    def belongs_to_another(self, settings: Mapping[str, object], drawn: Mapping[str, tuple[object, object]]) -> bool:
        """Whether something else was diagnosed here than is asked for, so that it cannot go on here.

        Args:
            settings: of :func:`settings_of`.
            drawn: the spec of each strategy by its id, and what its rollouts have beside that.
        """
        begun = self.path.is_dir() and any(not entry.name.startswith(".") for entry in self.path.iterdir())
        if not begun:
            return False
        rows = {row["strategy"]: row for row in self.lines(FINISHED, "strategy", "samples", "perturbation")}
        differ = any(name in rows and _drawn(rows[name]) != now for name, now in drawn.items())
        return differ or self.read(SETTINGS) != json.loads(json.dumps(settings))

    def is_complete(self, strategies: Sequence[str], map_settings: Mapping[str, object] | None) -> bool:
        """Whether the document is of these strategies, with the embedding map where its settings are given."""
        document = self.read(DIAGNOSIS)
        if document is None or {row["name"] for row in document["strategies"]} != set(strategies):
            return False
        if map_settings is None or document.get("embedding_map") is None:
            return map_settings is None and document.get("embedding_map") is None
        return (self.read(MAP) or {}).get("asked") == json.loads(json.dumps(map_settings))

    def has(self, strategy: Arm, rollouts: Mapping[str, Any]) -> bool:
        """Whether a strategy is finished here, its rollouts being drawn as described beside its perturbation.

        Raises:
            UsageError: where it was sampled with other options.
        """
        row = self.finished.get(strategy.id)
        if row is None:
            return False
        before, now = _drawn(row), (strategy.spec, dict(rollouts))
        if before != now:
            raise UsageError(
                f"--out {self.path}: {strategy.id!r} was sampled there with other options"
                f" ({_description(*before)}, now {_description(*now)}). Give a new folder."
            )
        return True

    def samples(self) -> dict[str, list[Sample]]:
        """The samples of each finished strategy, by its id."""
        samples: dict[str, list[Sample]] = {strategy: [] for strategy in self.finished}
        for number, line in enumerate(self.lines(SAMPLES, "strategy", "tokens"), start=1):
            try:
                samples[line["strategy"]].append(Sample.from_json(line))
            except (KeyError, TypeError, ValueError) as error:
                raise UsageError(f"{self.path / SAMPLES}: line {number} is no sample ({error}). Delete it.") from None
        return samples

    def keep(self, strategy: str, samples: Sequence[Sample], facts: dict[str, Any]) -> None:
        """Adds a finished strategy."""
        self.append(SAMPLES, [sample.to_json() for sample in samples])
        self.finished[strategy] = {"samples": len(samples), **facts}
        self.append(FINISHED, [{"strategy": strategy, **self.finished[strategy]}])


def _drawn(row: Mapping[str, object]) -> tuple[object, object]:
    """How a finished strategy was sampled: its perturbation's spec, and what its rollouts have beside that."""
    return row["perturbation"], row.get("rollouts", {})


def _description(perturbation: object, rollouts: object) -> str:
    return f"{perturbation} and {rollouts}" if rollouts else str(perturbation)
