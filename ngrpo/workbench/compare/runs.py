# SPDX-License-Identifier: Apache-2.0
"""The runs of a comparison: `ngrpo train`, then `ngrpo eval`, in processes of their own; their folder and progress."""

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ngrpo.config import parse
from ngrpo.config.arms import Arm
from ngrpo.config.run import FILE, PROGRESS, RunConfig
from ngrpo.machine.console import span
from ngrpo.machine.models import conversation, packaged
from ngrpo.machine.progress import follow
from ngrpo.machine.storage.datafiles import contents
from ngrpo.machine.storage.result_folder import CannotWrite, ResultFolder, writing
from ngrpo.machine.upstream.openrlhf_flags import MODEL_NAMES, Flags
from ngrpo.machine.upstream.versions import versions
from ngrpo.workbench.compare.plan import Plan, Run
from ngrpo.workbench.evaluate.evaluation import unscored, unscored_warnings

# The share of a core that readings of the memory may take: for each, the kernel walks all pages of a run, whose page
# faults wait meanwhile.
_MEMORY_SHARE = 0.02
_MEMORY_EVERY_SECONDS = 1.0
_GRACE_SECONDS = 20.0
_ERROR_LINES = 12

OnStep = Callable[[Mapping[str, Any]], None]
"""Takes a line of a run's :data:`PROGRESS`."""


class ComparisonFolder(ResultFolder):
    """The result folder of a comparison; ``runs/<id>/run.json`` says how each run ended."""

    def run_folder(self, run: Run) -> Path:
        """Where a run writes."""
        return self.path / "runs" / run.id

    def fresh(self, run: Run) -> Path:
        """A folder for a run, without the files of an interrupted one."""
        folder = self.run_folder(run)
        shutil.rmtree(folder, ignore_errors=True)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / PROGRESS).touch()
        return folder

    def need(self, size: int) -> None:
        """Raises :class:`CannotWrite` unless ``size`` bytes are free."""
        free = shutil.disk_usage(self.path).free
        if free < size:
            raise CannotWrite(
                self.path,
                f"{free / 2**30:.1f} GiB are free, and the next run writes about {size / 2**30:.1f} GiB",
            )


def run_config(plan: Plan, run: Run, folder: Path) -> RunConfig:
    """A run of a comparison: the shared flags, and its arm's own, which win; ``UsageError`` for unknown ones."""
    own = Flags(run.arm.training_flags)
    shared = Flags(plan.shared).without(*(flag.name for flag in own))
    flags = Flags(["--perturbation", "none", *shared.argv, *own.argv])
    if plan.reproducible:
        flags = flags.with_defaults({"--reproducible": "true"})
    config = parse.run_config([*flags.argv, "--train.seed", str(run.seed), "--run-dir", str(folder)])
    specs = dict(config.specs)
    if run.arm.spec:
        specs = {"perturbation": run.arm.spec, **specs}
    return replace(config, specs=specs, notes=run.arm.notes)


def eval_argv(plan: Plan, model: str, folder: Path, arm: Arm | None = None, seed: int | None = None) -> list[str]:
    """The words of ``ngrpo eval``, which renders prompts with the chat template of the training.

    The arms of a seed are sampled with the same draws, so that their differences are paired. Seeds have draws of their
    own: the noise of draws that all seeds share would be no part of the spread over seeds, by which an effect is
    judged. The perturbation stays off, unless the arm says ``perturb_eval``, as `hrpo` does: its gate is part of the
    policy.

    Args:
        seed: of the run; None for a model that no run has trained.
    """
    argv = ["--model", model]
    if seed is not None and not Flags(plan.evaluation or ()).has("--seed"):
        argv += ["--seed", str(seed)]
    if not Flags(plan.evaluation or ()).has(*conversation.EVALUATION_FLAGS):
        training = Flags([*plan.shared, *(arm.training_flags if arm else ())])
        for name, value in conversation.flags_like(training).items():
            argv += [name, value]
    argv += plan.evaluation or ()
    if arm and arm.spec and arm.spec.get("perturb_eval", False):
        argv += arm.perturbation_flags
    return [*argv, "--out", str(folder)]


def identity(plan: Plan, run: Run) -> str:
    """A hash of a finished run's causes: its commands' flags, the files that they name (methods, data, rewards,
    weights), the versions, and the user's choice of vLLM's model runner.
    """
    config = run_config(plan, run, Path())
    words = [config.task or "", *(plan.evaluation or ())]
    for flag in Flags(config.openrlhf):
        words += flag.values
    for spec in config.specs.values():
        words += _possible_paths(spec)
    digests = {**contents(words), **_weights_of_models(config)}
    chosen_runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    causes = [config.flags(), plan.evaluation, digests, versions(chosen_runner)]
    return hashlib.sha256(json.dumps(causes, sort_keys=True).encode()).hexdigest()[:16]


def _weights_of_models(config: RunConfig) -> dict[str, str]:
    """The fingerprint of each model's folder that the flags name, by its name."""
    models: set[str] = set()
    for flag in Flags(config.openrlhf):
        if flag.name.endswith(MODEL_NAMES) and flag.values:
            models |= set(flag.values[0].split(","))
    fingerprints = {}
    for model in models - set(packaged.PACKAGED):
        fingerprint = packaged.fingerprint(model)
        if fingerprint is not None:
            fingerprints[model] = fingerprint
    return fingerprints


def _possible_paths(spec: Mapping[str, Any]) -> list[str]:
    """The options of a spec that may name a file: texts with more than letters, digits, ``_`` and ``-``."""
    texts = []
    for key, value in spec.items():
        if key.rpartition(".")[2] in ("name", "source"):
            continue
        if isinstance(value, str) and not re.fullmatch(r"[\w-]*", value):
            texts.append(value)
    return texts


def is_evaluated(plan: Plan, model: str, folder: ComparisonFolder, path: Path) -> bool:
    """Whether the untrained model's evaluation is there; one of other problems, weights or versions is removed."""
    argv = eval_argv(plan, model, Path(path.name))  # which stays the same where the comparison's folder moves
    causes = [argv, contents(argv), packaged.fingerprint(model), versions()]
    if folder.read(f"{path.name}.json") != causes:
        shutil.rmtree(path, ignore_errors=True)
        folder.write(f"{path.name}.json", causes)
    return (path / "evaluation.json").is_file()


def status(plan: Plan, run: Run, folder: ComparisonFolder) -> dict[str, Any]:
    """The content of a run's ``run.json``; for a run that has to be trained, or must not be, only ``status``.

    ``pending``: the run is unfinished, or lacks a file. ``other``: a run with another identity has finished under its
    name.
    """
    record = folder.read(f"runs/{run.id}/run.json") or {}
    is_done = record.get("status") == "done"
    if record.get("identity") != identity(plan, run):
        return {"status": "other" if is_done else "pending"}
    needed = ["summary.json"]
    if plan.evaluation is not None:
        needed.append("evaluation/evaluation.json")
    if is_done and not all((folder.run_folder(run) / name).is_file() for name in needed):
        return {"status": "pending"}
    return record


def execute(plan: Plan, run: Run, folder: ComparisonFolder, on_step: OnStep) -> dict[str, Any]:
    """Trains and evaluates; returns the content of ``run.json``, or raises :class:`CannotWrite` where the disk is full.

    ``on_step`` gets each training step. The child processes keep the folder's lock while they live.
    """
    run_folder = folder.fresh(run)
    began = time.time()
    log = run_folder / "train.log"
    record: dict[str, Any] = {
        "identity": identity(plan, run),
        "arm": run.arm.id,
        "seed": run.seed,
        "error": None,
        "status": "done",
        "peak_memory_bytes": None,
    }
    try:
        run_config(plan, run, run_folder).write(run_folder / FILE)
        argv = ["train", "--config", str(run_folder / FILE), "--run-dir", str(run_folder)]
        record["peak_memory_bytes"] = command(argv, log, folder.lock, on_step)
        if plan.evaluation is not None:
            log = run_folder / "eval.log"
            argv = eval_argv(plan, str(run_folder / "model"), run_folder / "evaluation", run.arm, run.seed)
            command(["eval", *argv], log, folder.lock)
        if not plan.keep_models:
            shutil.rmtree(run_folder / "model", ignore_errors=True)
    except CommandFailed as failure:
        folder.need(1 << 26)  # A full disk is not the arm's fault: the run stays pending.
        record.update(status="failed", error=str(failure))
    record["seconds"] = round(time.time() - began, 1)
    record["log"] = str(log.relative_to(folder.path))
    folder.write(f"runs/{run.id}/run.json", record)
    return record


class CommandFailed(RuntimeError):
    """A command of a run failed; the message is the end of its log."""


def command(argv: Sequence[str], log: Path, lock: int, on_step: OnStep | None = None) -> int | None:
    """Runs an ``ngrpo`` command with its output in a file; ``on_step`` gets the lines of :data:`PROGRESS` next to it.

    Returns:
        The largest sum of :func:`_memory` while it ran, in bytes; None without ``on_step``, and where it is unknown, as
        on a Ray cluster.

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
    memory = _PeakMemory(process.pid)
    try:
        if on_step is None:
            process.wait()
        else:
            for line in follow(log.with_name(PROGRESS), lambda: process.poll() is not None):
                memory.read_if_due()
                if line:
                    on_step(json.loads(line))
    finally:
        _end(process)
    if process.returncode != 0:
        raise CommandFailed(_failure(log, process.returncode))
    if os.environ.get("RAY_ADDRESS"):  # the processes of a cluster are no children of this one
        return None
    return memory.peak or None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a command that still runs, as after Ctrl-C here, with its children: interrupts it, then kills it."""
    for sign, patience in ((signal.SIGINT, _GRACE_SECONDS), (signal.SIGKILL, None)):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)


def _failure(log: Path, code: int) -> str:
    """Our own error line of a log with what follows it; where there is none, the exit code and the end of the log."""
    lines = [line for line in log.read_text(errors="replace").replace("\r", "\n").splitlines() if line.strip()]
    for mark in ("ngrpo: error:", "ngrpo: training failed:"):
        numbers = [number for number, line in enumerate(lines) if line.startswith(mark)]
        if numbers:
            last = numbers[-1]
            return "\n".join(lines[last : last + _ERROR_LINES]).removeprefix("ngrpo: ")
    ending = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return "\n".join([f"{ending}; the log ends:", *lines[-_ERROR_LINES:]])


def _die_with_parent() -> None:
    """In the child: Linux sends it SIGTERM when the comparison dies."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class _PeakMemory:
    """The largest sum of :func:`_memory` of a process, read now and then.

    Attributes:
        peak: in bytes; 0 before the first reading.
    """

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._pid = pid
        self._next_reading = time.monotonic() + _MEMORY_EVERY_SECONDS

    def read_if_due(self) -> None:
        """Reads the memory, unless the last reading was a short time ago by :data:`_MEMORY_SHARE`."""
        began = time.monotonic()
        if began < self._next_reading:
            return
        self.peak = max(self.peak, _memory(self._pid))
        ended = time.monotonic()
        self._next_reading = ended + max(_MEMORY_EVERY_SECONDS, (ended - began) / _MEMORY_SHARE)


def _memory(pid: int) -> int:
    """Bytes of host memory that a process and its children hold (proportional set size), and of GPU memory that all
    processes use on all of this machine's GPUs.
    """
    import psutil

    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
    if shutil.which("nvidia-smi") is not None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        used = subprocess.run(query, capture_output=True, text=True, check=False).stdout  # MiB of each GPU
        total += sum(int(line) << 20 for line in used.split() if line.isdigit())
    return total


class Screen:
    """Prints one line per event; a comparison may run for hours in a log file, so nothing is overwritten."""

    def __init__(self, total: int, took: Sequence[float] = ()) -> None:
        """For ``total`` runs, of which the finished ones ``took`` seconds each."""
        self._total = total
        self._took = list(took)
        self._ended = len(self._took)

    def begin(self, number: int, run: Run) -> None:
        """A run starts; ``number`` counts from 1."""
        self._began = time.monotonic()
        self._head = f"[{number}/{self._total}] {run.arm.id}, seed {run.seed}"
        self._say("starts")

    def step(self, line: Mapping[str, Any]) -> None:
        """A training step of the current run."""
        step = line["step"]
        steps = line["steps"]
        seconds = line["seconds"]
        passed = time.monotonic() - self._began
        training = (steps - step) * seconds
        # Each run takes as long as the finished ones did; the first one goes by its own steps.
        whole_run = sum(self._took) / len(self._took) if self._took else passed + training
        later_runs = (self._total - self._ended - 1) * whole_run
        left = max(training, whole_run - passed) + later_runs
        self._say(f"step {step}/{steps}: reward {line['reward']:.3f}, {seconds:.0f} s, about {span(left)} left")

    def end(self, record: Mapping[str, Any], evaluation: Mapping[str, Any] | None) -> None:
        """The current run has ended."""
        self._ended += 1
        if record["status"] == "failed":
            self._say(f"FAILED: {str(record['error']).splitlines()[0]} (log: {record['log']})")
            return
        self._took.append(time.monotonic() - self._began)
        score = f", Mean@{evaluation['n']} {evaluation['mean_at_n']:.3f}" if evaluation else ""
        warnings = unscored_warnings("warning", unscored(evaluation or {}))
        self._say("; ".join([f"done in {span(record['seconds'])}{score}", *warnings]))

    def _say(self, text: str) -> None:
        print(f"{self._head}: {text}", flush=True)
