# SPDX-License-Identifier: Apache-2.0
"""One model type: makes a tiny model, has an engine roll out with it in a process of its own, and replays here."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.machine import ROOT

TOLERANCE = 1e-4
"""The largest |Δ log p| of an exact replay in float32."""
FACTOR = 1.5
"""How many times the unperturbed gap a perturbed one may be, where that is more."""
# Without the replay the gap must be this many times larger, or the case shows nothing.
_SENSITIVE = 20.0


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        type: transformers' model type.
        impl: vLLM's ``model_impl``: "auto", "vllm" or "transformers".
        dtype: of the weights and both forwards.
        runner: "V1", or "V2" under Triton's interpreter.
        compiled: vLLM compiles the model instead of running it eagerly.
        under: "", or what else the engine does: "preemption" (all requests are preempted twice and computed again,
            prefills in chunks), or "prefix caching" (prompts with a long common beginning, asked twice).
    """

    type: str
    impl: str = "auto"
    dtype: str = "float32"
    runner: str = "V1"
    compiled: bool = False
    under: str = ""


class Engines:
    """The processes that engines are forked from: one for each runner, with compilation and without."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, bool], subprocess.Popen[str]] = {}

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for server in self._servers.values():
            server.stdin.close()
            server.wait()

    def run(self, case: Case, folder: Path, log: Path, limit: float) -> dict[str, Any]:
        """What `benchmarks.models.rollouts.sampled` returns for a case, or why it returned nothing."""
        target = folder.parent / "rollouts"
        request = {
            "case": asdict(case),
            "folder": str(folder),
            "target": str(target),
            "log": str(log),
            "limit": limit,
        }
        server = self._server(case)
        print(json.dumps(request), file=server.stdin, flush=True)
        line = server.stdout.readline()
        if not line:
            del self._servers[case.runner, case.compiled]
            return {"verdict": "not run by vLLM", "message": "the process that engines are forked from died"}
        if not json.loads(line)["answered"]:
            return {"verdict": "not run by vLLM", "message": f"no answer within {limit:g} seconds"}
        if not target.exists():
            last_line = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
            return {"verdict": "not run by vLLM", "message": f"the process died: {last_line}"[:300]}
        return pickle.loads(target.read_bytes())

    def _server(self, case: Case) -> subprocess.Popen[str]:
        kind = (case.runner, case.compiled)
        if kind not in self._servers:
            mode = "compiled" if case.compiled else "eager"
            self._servers[kind] = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.models.rollouts", case.runner, mode],
                cwd=ROOT,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._servers[kind]


def measure(case: Case, engines: Engines, limit: float = 300.0, log: Path | None = None) -> dict[str, Any]:
    """The row of a case: its figures and the verdict, or the message of what did not work.

    What vLLM does not run in float32 is tried in bfloat16, which some of its kernels for CPUs demand.

    Args:
        case: what is measured.
        engines: where its engine runs.
        limit: seconds after which the engine is ended.
        log: what the engine prints goes to this file.
    """
    row = _measured(case, engines, limit, log)
    if case.dtype != "float32" or row["verdict"] != "not run by vLLM":
        return row
    bfloat16_row = _measured(replace(case, dtype="bfloat16"), engines, limit, log)
    if bfloat16_row["verdict"] != "not run by vLLM":
        return {**bfloat16_row, "float32": row["message"]}
    if bfloat16_row["message"] != row["message"]:
        return {**row, "bfloat16": bfloat16_row["message"]}
    return row


def _measured(case: Case, engines: Engines, limit: float, log: Path | None) -> dict[str, Any]:
    import torch

    from benchmarks.models import tiny
    from ngrpo.machine.models.packaged import resolve

    began = time.perf_counter()
    torch.set_num_threads(1)
    row: dict[str, Any] = asdict(case)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / case.type
        folder.mkdir()
        try:
            tiny.build(case.type, folder, Path(resolve("smollm2-135m")), getattr(torch, case.dtype))
        except tiny.NotBuilt as error:
            return {**row, "verdict": "not built", "message": str(error)[:300]}
        row |= engines.run(case, folder, log or Path(scratch) / "log", limit)
        rollouts = row.pop("rollouts", None)
        if rollouts is not None:
            try:
                row |= replayed(folder, rollouts, case.dtype)
            except Exception as error:  # of whatever kind the class raises
                row |= {"verdict": "not replayed", "message": f"{type(error).__name__}: {error}"[:300]}
    return {**row, "seconds": round(time.perf_counter() - began, 1)}


def replayed(folder: Path, rollouts: dict[str, Any], dtype: str) -> dict[str, Any]:
    """|Δ log p| at worst between rollouts and a forward of the trainer's class.

    Args:
        folder: of the model.
        rollouts: by the perturbation's name, and "none".
        dtype: of the forward.
    """
    import torch
    from transformers import AutoConfig

    from benchmarks.models.tiny import model_class
    from tests.stack.harness import gaps

    auto = model_class(AutoConfig.from_pretrained(folder))
    model = auto.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    names = [name for name in rollouts if name != "none"]
    unperturbed_gaps = gaps(model, rollouts["none"])
    replayed_gaps = {name: gaps(model, rollouts[name]) for name in names}
    unreplayed_gaps = {name: gaps(model, rollouts[name], replay=False) for name in names}
    unperturbed = float(unperturbed_gaps.max())
    perturbed = {name: float(replayed_gaps[name].max()) for name in names}
    unreplayed = max(float(unreplayed_gaps[name].max()) for name in names)
    means = [
        float(unperturbed_gaps.mean()),
        float(torch.cat(list(replayed_gaps.values())).mean()),
        float(torch.cat(list(unreplayed_gaps.values())).mean()),
    ]
    perturbed_rollouts = [rollout for name in names for rollout in rollouts[name]]
    return {
        "trainer_class": type(model).__name__,
        "unperturbed": unperturbed,
        "perturbed": perturbed,
        "unreplayed": unreplayed,
        "means": means,
        "tokens": sum(len(rollout.tokens) for rollout in perturbed_rollouts),
        "edits": sum(len(rollout.record) for rollout in perturbed_rollouts),
        "verdict": verdict(dtype, unperturbed, max(perturbed.values()), unreplayed),
    }


def verdict(dtype: str, unperturbed: float, perturbed: float, unreplayed: float) -> str:
    """ "right", "wrong", or "insensitive" where a forward without the replay lies hardly farther from the rollout."""
    tolerance = TOLERANCE if dtype == "float32" else 0.0
    bound = max(FACTOR * unperturbed, tolerance)
    if not perturbed <= bound:
        return "wrong"
    if unreplayed >= _SENSITIVE * perturbed:
        return "right"
    if unreplayed >= 0.1 > perturbed:
        return "right"
    return "insensitive"
