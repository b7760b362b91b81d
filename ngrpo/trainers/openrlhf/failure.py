# SPDX-License-Identifier: Apache-2.0
"""The reason why a training ended, in one paragraph, and the end of its left-over processes."""

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
_PROCESS = re.compile(r"^(\d+)\t([\d.]+)\t(.+)$", re.MULTILINE)
# Python's message on a node without this project, or with an older one.
_PROJECT = re.compile(r"No module named '(ngrpo|perturbations)(\.\w+)*'")
# Python's message at OpenRLHF's import, and transformers 5.15's for a missing attention.
_FLASH_ATTN = re.compile(r"No module named 'flash_attn|FlashAttention\d has been toggled on, but it cannot be used")
# torch 2.13 does not pass on the system's word if it cannot write a checkpoint.
_CHECKPOINT = re.compile(r"inline_container\.cc.*unexpected pos|PytorchStreamWriter failed", re.DOTALL)
_DISK = re.compile(r"No space left on device")


def root_cause(error: BaseException) -> str:
    """The innermost error of a chain of Ray errors in one paragraph, and where it was raised."""
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
    """A known error's meaning for the user, in one paragraph; None for any other error."""
    texts = [str(each) for each in _chain(error)]

    def matching(pattern: re.Pattern[str]) -> str | None:
        return next((text.strip() for text in texts if pattern.search(text)), None)

    if match := _MEMORY.search("\n".join(texts)):
        held: dict[str, str] = {}
        for process, gigabytes, command in _PROCESS.findall("\n".join(texts)):
            first = command.strip().split()[0] if command.strip() else "?"
            short = first if first.startswith("ray::") else Path(first).name  # Ray names its own ray::Actor.method
            held.setdefault(process, f"{short} {float(gigabytes):.1f} GB")
        most = f" Most was held by {', '.join(list(held.values())[:_MOST_SHOWN])}." if held else ""
        return (
            f"the machine ran out of memory: {float(match[1]):.1f} of {float(match[2]):.1f} GB were in use, and Ray"
            f" ended a process of this run.{most} End other programs, or reduce --train.micro_batch_size,"
            " --rollout.batch_size, --rollout.max_new_tokens, vLLM's memory (--vllm.gpu_memory_utilization; on a CPU"
            " VLLM_CPU_KVCACHE_SPACE) or the model."
        )
    if text := matching(_PROJECT):
        line = next(line for line in text.splitlines() if _PROJECT.search(line)).strip()  # Ray appends its log's end
        return (
            "a node of the cluster is without ngrpo, or has another release of it. Install the same one on every node"
            f" (docs/install.md). The node said: {line}"
        )
    if text := matching(_FLASH_ATTN):
        return (
            "a node of the cluster has no working flash-attn, but the run was started where it is installed, so"
            " OpenRLHF needs it everywhere. Install the same flash-attn on every node (docs/install.md), or remove it"
            f" where runs are started, which then use --ds.attn_implementation sdpa. The node said: {text}"
        )
    checkpoint = matching(_CHECKPOINT)
    if text := checkpoint or matching(_DISK):
        what = (
            "a file could not be written: no space is left on its device. A run writes to --run-dir, --ckpt.path,"
            " --ckpt.output_dir and --logger.tensorboard_dir. The last checkpoint"
            if checkpoint is None
            else "a checkpoint could not be written whole: no space is left on the device of --ckpt.path or"
            " --ckpt.output_dir. The one before"
        )
        return (
            f"{what} is still there. Make room (--ckpt.max_num keeps fewer) and go on with --ckpt.load_enable. The"
            f" writer said: {text.splitlines()[-1]}"
        )
    return None


def _chain(error: BaseException) -> list[BaseException]:
    """An error, its cause, and so on; a RayTaskError has the error as it was raised in its ``cause``."""
    chain = [error]
    while True:
        cause = getattr(chain[-1], "cause", None)
        following = cause if isinstance(cause, BaseException) else chain[-1].__cause__
        if following is None or following in chain:
            return chain
        chain.append(following)


def end_processes(run_id: str) -> None:
    """Ends this machine's processes that still have a run's identity, after a few seconds of grace.

    Ray ends its own workers, but not their children: torch's compiler processes outlive a worker that was killed.
    """
    import psutil

    def left() -> list[psutil.Process]:
        everyone = psutil.process_iter(["environ"])  # None for a process of another user
        return [p for p in everyone if p.pid != os.getpid() and (p.info["environ"] or {}).get(RUN_ID) == run_id]

    psutil.wait_procs(left(), timeout=_GRACE_SECONDS)
    for process in left():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
