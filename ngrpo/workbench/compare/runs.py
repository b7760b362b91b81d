# SPDX-License-Identifier: Apache-2.0
"""The runs of a comparison: `ngrpo train`, then `ngrpo eval`, each in its own process; and their folder."""

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
from ngrpo.machine.storage.result_folder import CannotWrite, ResultFolder, writing
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.workbench.compare.plan import Plan, Run

_MEMORY_EVERY_SECONDS = 5.0  # a reading takes a fifth of a second, most of it in the kernel
_GRACE_SECONDS = 20.0
_ERROR_LINES = 12

OnStep = Callable[[StepLine, "int | None"], None]


class ComparisonFolder(ResultFolder):
    """The result folder of a comparison; ``runs/<id>/run.json`` says how each run ended."""

    def run_folder(self, run: Run) -> Path:
        """Where a run writes."""
        return self.path / "runs" / run.id

    def fresh(self, run: Run) -> Path:
        """An empty folder for a run; files of an interrupted one are removed, for they cannot be trusted."""
        folder = self.run_folder(run)
        shutil.rmtree(folder, ignore_errors=True)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def need(self, size: int) -> None:
        """Raises :class:`CannotWrite` unless ``size`` bytes are free."""
        free = shutil.disk_usage(self.path).free
        if free < size:
            needed = f"{free / 2**30:.1f} GiB are free, and the next run writes about {size / 2**30:.1f} GiB"
            raise CannotWrite(self.path, needed)


def run_config(plan: Plan, run: Run, folder: Path) -> RunConfig:
    """A run of a comparison: the shared flags, with the differences of its arm. An arm's own flags win.

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
    perturbed = []
    if arm is not None and arm.spec is not None and arm.spec.get("perturb_eval", False):
        perturbed = arm.perturbation_flags
    return ["--model", model, *(plan.evaluation or ()), *perturbed, "--out", str(folder)]


def identity(plan: Plan, run: Run) -> str:
    """A hash of all that a finished run depends on: every flag of its commands, the files they name, and the versions.

    A user's own perturbation counts with its source; a dataset, a reward function and a file behind an option with
    their content; a model folder with its weights. A choice of vLLM's model runner by the user counts too.
    """
    from ngrpo.machine.upstream.versions import versions

    chosen = versions(os.environ.get("VLLM_USE_V2_MODEL_RUNNER"))
    config = run_config(plan, run, Path())
    flags = list(Flags(config.openrlhf))
    named = [config.task or "", *(value for flag in flags for value in flag.values), *(plan.evaluation or ())]
    for spec in config.specs.values():
        options = (value for key, value in spec.items() if key.rpartition(".")[2] not in ("name", "source"))
        named += [value for value in options if isinstance(value, str) and not re.fullmatch(r"[\w-]*", value)]
    files = contents(named)
    models = [flag.values[0] for flag in flags if flag.name.endswith(parse.MODEL_FLAG) and flag.values]
    for name in {name for value in models for name in value.split(",")} - packaged.PACKAGED.keys():
        weights = packaged.fingerprint(name)
        if weights is not None:
            files[name] = weights
    parts = json.dumps([config.flags(), plan.evaluation, files, chosen], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def status(plan: Plan, run: Run, folder: ComparisonFolder) -> dict[str, Any]:
    """The content of a run's ``run.json``.

    ``{"status": "pending"}`` where the run has not ended or a file of its results is missing, and
    ``{"status": "other"}`` where a run with another identity has finished under the same name.
    """
    record = folder.read(f"runs/{run.id}/run.json") or {}
    done = record.get("status") == "done"
    if record.get("identity") != identity(plan, run):
        return {"status": "other" if done else "pending"}
    needed = ["summary.json", *([] if plan.evaluation is None else ["evaluation/evaluation.json"])]
    if done and not all((folder.run_folder(run) / name).is_file() for name in needed):
        return {"status": "pending"}
    return record


def execute(plan: Plan, run: Run, folder: ComparisonFolder, on_step: OnStep) -> dict[str, Any]:
    """Trains and evaluates, and writes how it ended.

    ``on_step`` is called with each training step and the number of prompts of the whole run, if known. The child
    processes keep the folder's lock, so that no second comparison starts there while they live.

    Returns:
        The content of ``run.json``.

    Raises:
        CannotWrite: where the disk is full; the run is left pending.
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
    seconds, path = round(time.time() - began, 1), str(log.relative_to(folder.path))
    record.update(seconds=seconds, peak_memory_bytes=peak, log=path)
    folder.write(f"runs/{run.id}/run.json", record)
    return record


class CommandFailed(RuntimeError):
    """A command of a run failed; the message is the end of its log."""


def command(argv: Sequence[str], log: Path, lock: int, on_step: OnStep = lambda step, prompts: None) -> int | None:
    """Runs an ``ngrpo`` command with its output in a file.

    Returns:
        The most memory that it and its processes held, in bytes; None where it is unknown, as on a Ray cluster.

    Raises:
        CommandFailed: for an exit code other than 0.
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
    prompts: int | None = None
    peak, measured = 0, time.monotonic()
    try:
        for line in follow(log, lambda: process.poll() is not None):
            if time.monotonic() - measured > _MEMORY_EVERY_SECONDS:
                peak, measured = max(peak, _memory(process.pid)), time.monotonic()
            prompts = read_total(line + " ") or prompts
            step = read_step(line)
            if step is not None:
                on_step(step, prompts)
    finally:
        # The user interrupted: end the process and its children, politely first.
        for sign, patience in ((signal.SIGINT, _GRACE_SECONDS), (signal.SIGKILL, None)):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sign)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience)
    if process.returncode != 0:
        raise CommandFailed(_last_words(log, process.returncode))
    return None if os.environ.get("RAY_ADDRESS") else peak or None


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


def _memory(pid: int) -> int:
    """Bytes that a process and its children hold: proportional set size, and GPU memory if any."""
    import psutil

    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
    if shutil.which("nvidia-smi") is not None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False)
        total += sum(int(line) << 20 for line in answer.stdout.split() if line.isdigit())
    return total
