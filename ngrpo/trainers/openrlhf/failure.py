# SPDX-License-Identifier: Apache-2.0
"""Why a training ended, in one paragraph, and the end of what it left running."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

RUN_ID = "NGRPO_RUN_ID"
"""Environment variable that every process of a run inherits, so that those left over can be found."""

_GRACE_SECONDS = 5.0
_MOST_SHOWN = 5
# Ray 2.55, raylet: the memory monitor's message, and a row of its table of processes (id, GB, command).
_MEMORY = re.compile(r"Memory on the node .*? was ([\d.]+)\s?GB / ([\d.]+)\s?GB", re.DOTALL)
# What Python says on a node that has not this project, or an older one.
_PROJECT = re.compile(r"No module named '(ngrpo|perturbations)(\.\w+)*'")
# What Python says of OpenRLHF's import, and transformers 5.15 of an attention that is not there.
_FLASH_ATTN = re.compile(r"No module named 'flash_attn|FlashAttention\d has been toggled on, but it cannot be used")
# torch 2.13 does not pass on the system's word where it writes a checkpoint.
_CHECKPOINT = re.compile(r"inline_container\.cc.*unexpected pos|PytorchStreamWriter failed", re.DOTALL)
_DISK = re.compile(r"No space left on device")
_PROCESS = re.compile(r"^(\d+)\t([\d.]+)\t(.+)$", re.MULTILINE)


def root_cause(error: BaseException) -> str:
    """Returns the innermost error of a chain of Ray errors in one paragraph, and where it was raised."""
    chain = _chain(error)
    where = next((str(each.function_name) for each in reversed(chain) if getattr(each, "function_name", "")), "")
    text = str(chain[-1]).strip() or "(no message)"
    name = type(chain[-1]).__name__
    cause_text = f"{name}: {text}"
    # An actor that died while it was made has its whole traceback as its message; the error's own line
    # is the last one that is not indented.
    lines = [line for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
    if lines and "\n  File " in text:
        cause_text = lines[-1] + f"\n  ({name}; the traceback is above)"
    return cause_text + (f"\n  in {where}" if where else "")


def explanation(error: BaseException) -> str | None:
    """What an error means for the user, in one paragraph, where it is one that is known; None for any other."""
    return memory_ran_out(error) or project_missing(error) or flash_attn_missing(error) or disk_full(error)


def memory_ran_out(error: BaseException) -> str | None:
    """What an error means for the user where Ray's memory monitor ended a process; None for any other error."""
    text = "\n".join(map(str, _chain(error)))
    match = _MEMORY.search(text)
    if match is None:
        return None
    held: dict[str, str] = {}
    for process, gigabytes, command in _PROCESS.findall(text):
        held.setdefault(process, f"{_short(command)} {float(gigabytes):.1f} GB")
    most = f" Most was held by {', '.join(list(held.values())[:_MOST_SHOWN])}." if held else ""
    return (
        f"the machine ran out of memory: {float(match[1]):.1f} of {float(match[2]):.1f} GB were in use, and Ray ended"
        f" a process of this run.{most} End other programs, or ask for less: a smaller --train.micro_batch_size,"
        " --rollout.batch_size or --rollout.max_new_tokens, less memory for vLLM (--vllm.gpu_memory_utilization; on a"
        " CPU VLLM_CPU_KVCACHE_SPACE), or a smaller model."
    )


def project_missing(error: BaseException) -> str | None:
    """What an error means where a node of a cluster is without this project; None for any other error."""
    text = _matching(error, _PROJECT)
    if text is None:
        return None
    line = next(line for line in text.splitlines() if _PROJECT.search(line)).strip()  # Ray adds what its log ends with
    return (
        "a node of the cluster is without ngrpo, or has another release of it. Install the same one on every node"
        f" (docs/install.md). The node said: {line}"
    )


def flash_attn_missing(error: BaseException) -> str | None:
    """What an error means where one node of a cluster lacks flash-attn; None for any other error."""
    line = _matching(error, _FLASH_ATTN)
    if line is None:
        return None
    return (
        "a node of the cluster has no flash-attn that works, but the run was started where flash-attn is installed, so"
        " that OpenRLHF counts on it everywhere. Install the same flash-attn on every node (docs/install.md), or remove"
        f" it where runs are started, which then use --ds.attn_implementation sdpa. The node said: {line}"
    )


def disk_full(error: BaseException) -> str | None:
    """What an error means for the user where a file could not be written; None for any other error."""
    checkpoint, other = _matching(error, _CHECKPOINT), _matching(error, _DISK)
    if checkpoint is None and other is None:
        return None
    what = (
        "a file could not be written: no space is left on its device. A run writes to --run-dir, --ckpt.path,"
        " --ckpt.output_dir and --logger.tensorboard_dir. The last checkpoint"
        if checkpoint is None
        else "a checkpoint could not be written whole: no space is left on the device of --ckpt.path or"
        " --ckpt.output_dir. The one before"
    )
    return (
        f"{what} is still there. Make room (--ckpt.max_num keeps fewer) and go on with --ckpt.load_enable. The writer"
        f" said: {(checkpoint or other or '').splitlines()[-1]}"
    )


def _matching(error: BaseException, pattern: re.Pattern[str]) -> str | None:
    """The first text of a chain of errors in which a pattern is found."""
    return next((text.strip() for text in map(str, _chain(error)) if pattern.search(text)), None)


def _chain(error: BaseException) -> list[BaseException]:
    """An error, what caused it, and so on; a RayTaskError has the error as it was raised in its ``cause``."""
    chain = [error]
    while True:
        cause = getattr(chain[-1], "cause", None)
        following = cause if isinstance(cause, BaseException) else chain[-1].__cause__
        if following is None or following in chain:
            return chain
        chain.append(following)


def _short(command: str) -> str:
    """A process's command in a few words: Ray names its own ``ray::Actor.method``."""
    first = command.strip().split()[0] if command.strip() else "?"
    return first if first.startswith("ray::") else Path(first).name


def end_processes(run_id: str) -> None:
    """Ends the processes on this machine that still carry a run's identity, after a few seconds of grace.

    Ray ends its own workers, but not what those started: torch's compiler processes outlive a worker that was killed.
    """
    import psutil

    def left() -> list[psutil.Process]:
        everyone = psutil.process_iter(["environ"])  # None for a process of another user
        return [p for p in everyone if p.pid != os.getpid() and (p.info["environ"] or {}).get(RUN_ID) == run_id]

    psutil.wait_procs(left(), timeout=_GRACE_SECONDS)
    for process in left():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
