# SPDX-License-Identifier: Apache-2.0
"""One run of a comparison: `ngrpo train`, then `ngrpo eval`, each in a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ngrpo.config import parse
from ngrpo.config.arms import Arm
from ngrpo.config.run import FILE, RunConfig
from ngrpo.machine.console.progress import StepLine, follow, read_step, read_total
from ngrpo.machine.models import packaged
from ngrpo.machine.storage.datafiles import contents
from ngrpo.machine.storage.result_folder import writing
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.workbench.compare.comparison_folder import ComparisonFolder
from ngrpo.workbench.compare.plan import Plan, Run

_MEMORY_EVERY_SECONDS = 5.0  # a reading takes a fifth of a second, most of it in the kernel
_GRACE_SECONDS = 20.0
_ERROR_LINES = 12

OnStep = Callable[[StepLine, "int | None"], None]


def run_config(plan: Plan, run: Run, folder: Path) -> RunConfig:
    """A run of a comparison: what all share, with the differences of its arm. An arm's own flags win.

    Raises:
        UsageError: for flags that are none of ``ngrpo train``'s.
    """
    own = Flags(run.arm.training_flags)
    shared = Flags(plan.shared).without(*(flag.name for flag in own))
    both = Flags(["--perturbation", "none", *shared.argv, *own.argv])
    both = both.with_defaults({"--reproducible": "true"} if plan.reproducible else {})
    common = parse.run_config([*both.argv, "--train.seed", str(run.seed), "--run-dir", str(folder)])
    perturbed = {} if run.arm.spec is None else {"perturbation": run.arm.spec}
    return replace(common, specs={**perturbed, **common.specs}, notes=run.arm.notes)


def eval_argv(plan: Plan, model: str, folder: Path, arm: Arm | None = None) -> list[str]:
    """The words of ``ngrpo eval``. All models are sampled with the same draws.

    The perturbation stays off, unless the arm says ``perturb_eval``, as `hrpo` does: its gate is part of the policy.
    """
    assert plan.evaluation is not None
    perturbed = []
    if arm is not None and arm.spec is not None and arm.spec.get("perturb_eval", False):
        perturbed = arm.perturbation_flags
    return ["--model", model, *plan.evaluation, *perturbed, "--out", str(folder)]


def identity(plan: Plan, run: Run) -> str:
    """What makes a finished run this one: every flag of its commands, the files they name, and the versions.

    A strategy of the user's own counts with its source, a dataset, a reward function and a file behind an option with
    their content, a model folder with its weights, and vLLM's choice of a model runner where the user made it: no
    comparison has runs on either side of it.
    """
    from ngrpo.machine.upstream.versions import versions

    chosen = versions(os.environ.get("VLLM_USE_V2_MODEL_RUNNER"))
    config = run_config(plan, run, Path())
    files = contents([*_values(config), *(plan.evaluation or ())]) | _model_folders(config)
    parts = json.dumps([config.flags(), plan.evaluation, files, chosen], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def _values(config: RunConfig) -> list[str]:
    """All values that may name a file: of the task, of OpenRLHF's flags, and of options, which are paths at most."""
    values = [config.task or "", *(value for flag in Flags(config.openrlhf) for value in flag.values)]
    for spec in config.specs.values():
        options = (value for key, value in spec.items() if key.rpartition(".")[2] not in ("name", "source"))
        values += [value for value in options if isinstance(value, str) and not re.fullmatch(r"[\w-]*", value)]
    return values


def _model_folders(config: RunConfig) -> dict[str, str]:
    """What tells the weights apart that local model folders hold, by the folder as it was named."""
    named = {flag.values[0] for flag in Flags(config.openrlhf) if flag.name.endswith(parse.MODEL_FLAG) and flag.values}
    folders = {name for value in named for name in value.split(",")} - set(packaged.PACKAGED)
    return {name: weights for name in folders if (weights := packaged.fingerprint(name)) is not None}


def status(plan: Plan, run: Run, folder: ComparisonFolder) -> dict[str, Any]:
    """How a run ended, as :meth:`ComparisonFolder.status` says it."""
    return folder.status(run, identity(plan, run), evaluated=plan.evaluation is not None)


def execute(plan: Plan, run: Run, folder: ComparisonFolder, on_step: OnStep) -> dict[str, Any]:
    """Trains and evaluates, and writes how it ended.

    Args:
        plan: the comparison.
        run: one of its runs.
        folder: the comparison's folder. Its lock is kept by the children: a comparison that was killed is not started
            twice over their heads.
        on_step: called with each training step and the number of prompts of the whole run, if known.

    Returns:
        The content of ``run.json``: ``status``, ``error``, ``seconds``, ``peak_memory_bytes``, ``log``.

    Raises:
        ngrpo.machine.storage.result_folder.CannotWrite: where the disk is full; the run is left pending.
    """
    run_folder, began = folder.fresh(run), time.time()
    log = run_folder / "train.log"
    record: dict[str, Any] = {"identity": identity(plan, run), "arm": run.arm.id, "seed": run.seed, "error": None}
    peak: int | None = None
    try:
        run_config(plan, run, run_folder).write(run_folder / FILE)
        argv = ["train", "--config", str(run_folder / FILE), "--run-dir", str(run_folder)]
        peak = command(argv, log, folder.lock, on_step)
        if plan.evaluation is not None:
            log = run_folder / "eval.log"
            argv = eval_argv(plan, str(run_folder / "model"), run_folder / "evaluation", run.arm)
            command(["eval", *argv], log, folder.lock)
        record["status"] = "done"
        if not plan.keep_models:
            shutil.rmtree(run_folder / "model", ignore_errors=True)
    except CommandFailed as failure:
        folder.need(1 << 26)  # A full disk is not the strategy's fault: the run stays pending.
        record.update(status="failed", error=str(failure))
    record.update(
        seconds=round(time.time() - began, 1),
        peak_memory_bytes=peak,
        log=str(log.relative_to(folder.path)),
    )
    folder.finish(run, record)
    return record


class CommandFailed(RuntimeError):
    """A command of a run failed; the message is the end of its log."""


def command(argv: Sequence[str], log: Path, lock: int, on_step: OnStep = lambda step, prompts: None) -> int | None:
    """Runs an ``ngrpo`` command with its output in a file.

    Returns:
        The most memory that it and its processes held, in bytes, where that is known.

    Raises:
        CommandFailed: where it ends with anything but 0.
    """
    with writing(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("wb")
    with output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ngrpo.cli", *argv],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            pass_fds=(lock,),
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    memory = _PeakMemory(process.pid)
    prompts: int | None = None
    try:
        for line in follow(log, lambda: process.poll() is not None):
            prompts = read_total(line + " ") or prompts
            step = read_step(line)
            if step is not None:
                on_step(step, prompts)
    finally:
        _stop(process)
        peak = memory.stop()
    if process.returncode != 0:
        raise CommandFailed(_last_words(log, process.returncode))
    return peak


def _stop(process: subprocess.Popen) -> None:
    """Ends a process that still runs (the user interrupted) and what it started, politely first."""
    if process.poll() is not None:
        return
    for sign, patience in ((signal.SIGINT, _GRACE_SECONDS), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        try:
            process.wait(patience)
            return
        except subprocess.TimeoutExpired:
            continue


def _die_with_parent() -> None:
    """In the child: ask Linux for SIGTERM when the comparison dies, however it dies. Elsewhere nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _last_words(log: Path, code: int) -> str:
    """Our own error line where there is one, else the end of the log."""
    lines = [line for line in log.read_text(errors="replace").replace("\r", "\n").splitlines() if line.strip()]
    for mark in ("ngrpo: error:", "ngrpo: training failed:"):
        at = next((i for i in range(len(lines) - 1, -1, -1) if lines[i].startswith(mark)), None)
        if at is not None:
            return "\n".join(lines[at : at + _ERROR_LINES]).removeprefix("ngrpo: ")
    ending = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return "\n".join([f"{ending}; the log ends:", *lines[-_ERROR_LINES:]])


class _PeakMemory:
    """Samples the memory of a process and all that it started: proportional set size, and GPU memory if any."""

    def __init__(self, pid: int) -> None:
        self._pid, self._peak, self._done = pid, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int | None:
        """The largest sum seen; None where nothing could be read, or the processes run on a Ray cluster elsewhere."""
        self._done.set()
        self._thread.join()
        return None if os.environ.get("RAY_ADDRESS") or not self._peak else self._peak

    def _watch(self) -> None:
        import psutil

        while not self._done.wait(_MEMORY_EVERY_SECONDS):
            total = 0
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(self._pid)
                for process in (root, *root.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        total += process.memory_full_info().pss
            self._peak = max(self._peak, total + _gpu_memory())


def _gpu_memory() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return sum(int(line) << 20 for line in answer.stdout.split() if line.isdigit())
