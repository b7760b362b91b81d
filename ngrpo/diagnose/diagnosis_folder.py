"""The folder of a diagnosis: finished strategies are kept, whatever happens to the ones after them.

``samples.jsonl`` grows by one strategy at a time; only then does ``finished.jsonl`` name the strategy. Samples of a
strategy that is not named there are what an interrupted run left, and are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ngrpo.arms import Arm
from ngrpo.diagnose.sample import Sample
from ngrpo.result_folder import ResultFolder
from perturbations.errors import UsageError

SAMPLES, FINISHED, MAP = "samples.jsonl", "finished.jsonl", "embedding_map.json"
DIAGNOSIS, REPORT = "diagnosis.json", "diagnosis.html"


class DiagnosisFolder(ResultFolder):
    """The result folder of a diagnosis."""

    finished: dict[str, dict[str, Any]]
    """What the engine told of each finished strategy, by id; with its ``perturbation`` and ``seconds``."""

    def claim(self, settings: Mapping[str, Any]) -> bool:
        """As :meth:`ResultFolder.claim`; removes the samples of strategies that were not finished."""
        new = super().claim(settings)
        self.finished = {row.pop("strategy"): row for row in self.lines(FINISHED, "strategy", "perturbation")}
        lines = self.lines(SAMPLES, "strategy", "tokens")
        kept = [line for line in lines if line["strategy"] in self.finished]
        if len(kept) < len(lines):
            self.write_lines(SAMPLES, kept)
        return new

    def has(self, strategy: Arm) -> bool:
        """Whether a strategy is finished here.

        Raises:
            UsageError: where it was sampled with other options.
        """
        kept = self.finished.get(strategy.id)
        if kept is not None and kept["perturbation"] != strategy.spec:
            raise UsageError(
                f"--out {self.path}: {strategy.id!r} was sampled there with other options"
                f" ({kept['perturbation']}, now {strategy.spec}). Give a new folder."
            )
        return kept is not None

    def samples(self, strategy: str) -> list[Sample]:
        """The samples of a finished strategy."""
        lines = self.lines(SAMPLES, "strategy", "tokens")
        return [Sample.from_json(line) for line in lines if line["strategy"] == strategy and strategy in self.finished]

    def keep(self, strategy: str, samples: Sequence[Sample], facts: dict[str, Any]) -> None:
        """Adds a finished strategy."""
        self.append(SAMPLES, [sample.to_json() for sample in samples])
        self.append(FINISHED, [{"strategy": strategy, **facts}])
        self.finished[strategy] = facts
