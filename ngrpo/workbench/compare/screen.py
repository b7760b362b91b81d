# SPDX-License-Identifier: Apache-2.0
"""Live progress of a comparison (run, step, reward, time left), and its outcome as a table."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ngrpo.machine.console.progress import StepLine, span
from ngrpo.machine.console.text import text_table
from ngrpo.workbench.compare.plan import Run


class Screen:
    """Prints one line per event; a comparison may run for hours in a log file, so nothing is overwritten."""

    def __init__(self, total: int, batch: int, took: Sequence[float] = ()) -> None:
        """
        Args:
            total: runs of the comparison, finished ones included.
            batch: prompts of a training step.
            took: seconds of each finished run.
        """
        self._total, self._batch = total, batch
        self._took = list(took)

    def begin(self, number: int, run: Run) -> None:
        """A run starts; ``number`` counts from 1."""
        self._began = time.monotonic()
        self._head = f"[{number}/{self._total}] {run.arm.id}, seed {run.seed}"
        self._say("starts")

    def step(self, line: StepLine, prompts: int | None) -> None:
        """A training step of the current run, with the number of prompts of the whole run."""
        took = "" if line.seconds is None else f", {line.seconds:.0f} s"
        if prompts is None:
            self._say(f"step {line.step}: reward {line.reward:.3f}{took}")
            return
        steps = max(line.step, -(-prompts // self._batch))
        left = span(self._left(line, steps))
        self._say(f"step {line.step}/{steps}: reward {line.reward:.3f}{took}, about {left} left")

    def _left(self, line: StepLine, steps: int) -> float:
        """Seconds until all runs have ended, if each takes as long as the finished ones did.

        The estimate of the first run uses its steps only; the first step waits for the engine.
        """
        passed = time.monotonic() - self._began
        training = (steps - line.step) * (passed / line.step if line.seconds is None else line.seconds)
        if not self._took:
            return training + (self._total - 1) * (passed + training)
        run = sum(self._took) / len(self._took)
        return max(training, run - passed) + (self._total - len(self._took) - 1) * run

    def end(self, record: Mapping[str, Any], evaluation: Mapping[str, Any] | None) -> None:
        """The current run has ended."""
        self._took.append(time.monotonic() - self._began)
        if record["status"] == "failed":
            first = str(record["error"]).splitlines()[0]
            self._say(f"FAILED: {first} (log: {record['log']})")
            return
        score = "" if not evaluation else f", Mean@{evaluation['n']} {evaluation['mean_at_n']:.3f}"
        self._say(f"done in {span(record['seconds'])}{score}")

    def _say(self, text: str) -> None:
        print(f"{self._head}: {text}", flush=True)


def table(results: Mapping[str, Any]) -> str:
    """The outcome in a few lines."""
    n = next((row["n"] for row in results["summary"] if row["n"]), None)
    ks = next((row["pass_at_k"] for row in results["summary"] if row["pass_at_k"]), {})
    largest_k = [k for k in ks if k != "1"][-1:]
    evaluated = [*([f"Mean@{n}"] if n else []), *(f"Pass@{k}" for k in largest_k)]
    rows = [["strategy", "seeds", *evaluated, "reward of own rollouts", "tokens/s", "s/step"]]
    for row in results["summary"]:
        scores = [*([row["mean_at_n"]] if n else []), *(row["pass_at_k"].get(k) for k in largest_k)]
        first, last = (_number(row[key], bounds=False) for key in ("reward_first", "reward_last"))
        ratios = (row["cost"][key]["ratio"] for key in ("tokens_per_second", "step_seconds"))
        rows.append(
            [
                row["strategy"],
                str(len(row["seeds"])),
                *map(_number, scores),
                "–" if row["reward_last"] is None else f"{first} → {last}",
                *("–" if ratio is None else f"×{ratio:.2f}" for ratio in ratios),
            ]
        )
    verdicts = [f"{row['strategy']}: {row['verdict']}" for row in results["summary"]]
    return "\n".join([*text_table(rows, left=len(rows[0])), "", *verdicts])


def _number(value: Mapping[str, Any] | None, *, bounds: bool = True) -> str:
    if value is None:
        return "–"
    between = f" [{value['low']:.3f}, {value['high']:.3f}]" if bounds and value["low"] is not None else ""
    return f"{value['value']:.3f}{between}"
