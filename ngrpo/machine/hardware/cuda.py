# SPDX-License-Identifier: Apache-2.0
"""The CUDA profile: OpenRLHF and vLLM as they are. Nothing is added, nothing is replaced.

`ngrpo.machine.hardware.attention` says what differs where flash-attn is not installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from ngrpo.machine.hardware.profile import Profile
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError

_DEFAULT_HOME = Path("/usr/local/cuda")
# The last major release whose minor ones DeepSpeed takes for each other (op_builder/builder.py).
_MINORS_MIX = 12
# What the CUDA code of DeepSpeed's fused Adam includes through torch 2.13 (ATen/cuda/CUDAContextLight.h).
HEADERS = ("cuda_runtime_api.h", "cusparse.h", "cublas_v2.h", "cublasLt.h", "cusolverDn.h")
_AFTERWARDS = "and set CUDA_HOME to its folder (docs/install.md)"


def toolkit() -> tuple[Path | None, str | None]:
    """The CUDA toolkit that torch 2.13 would compile with, found in its order, and the release of its nvcc, as "13.0".

    None for the folder where there is none, and for the release where the folder has no nvcc that runs.
    """
    variable, nvcc = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"), shutil.which("nvcc")
    home = Path(variable) if variable else Path(nvcc).parent.parent if nvcc else _DEFAULT_HOME
    if not (variable or home.is_dir()):
        return None, None
    try:
        process = subprocess.run([home / "bin" / "nvcc", "-V"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return home, None
    match = re.search(r"release (\d+\.\d+)", process.stdout)
    return home, match and match[1]


def check(flags: Flags) -> str | None:
    """Refuses a training whose optimizer DeepSpeed 0.19.6 could not compile: it tries once all models are loaded.

    The fused Adam is CUDA code. The Adam of ``--ds.adam_offload`` is compiled against the toolkit too where torch sees
    a GPU, and from CUDA 13 on DeepSpeed refuses a toolkit of another minor release for it. On a Ray cluster that is
    there already the nodes have toolkits of their own, so nothing is asked of this one.

    Returns:
        Why it could not look, or None.

    Raises:
        UsageError: With what is missing and what to install.
    """
    import torch

    torch_release, offload = torch.version.cuda, flags.has("--ds.adam_offload")
    if flags.has("--help"):
        return None
    if os.environ.get("RAY_ADDRESS", "local") != "local":
        return f"not checked: the CUDA toolkits of the nodes of the Ray cluster at {os.environ['RAY_ADDRESS']}."
    if torch_release is None:
        return "not checked: torch is built for a CPU here, so neither a GPU nor its toolkit can be looked at."
    subject = "--ds.adam_offload" if offload else "DeepSpeed's fused Adam"
    if _compiled_before("cpu_adam" if offload else "fused_adam"):
        return None
    home, release = toolkit()
    install = f"Fix: install the CUDA toolkit {_minor(torch_release)}, the release of this torch, {_AFTERWARDS}"
    why = f"{subject} is compiled on first use, for which DeepSpeed needs the CUDA toolkit"
    if home is None:
        raise UsageError(
            f"{why}: none is found, neither by CUDA_HOME nor as nvcc on PATH nor in {_DEFAULT_HOME}. {install}."
        )
    if release is None:
        raise UsageError(f"{why}: {home} has no bin/nvcc that runs. {install}.")
    skipped = offload and os.environ.get("DS_SKIP_CUDA_CHECK") == "1"
    major = release.split(".")[0]
    exactly = offload and not skipped and int(major) > _MINORS_MIX
    fits = release == _minor(torch_release) if exactly else major == torch_release.split(".")[0]
    if not fits:
        instead = f", or set DS_SKIP_CUDA_CHECK=1 if {release} will do" if exactly else ""
        raise UsageError(f"{why} of torch's own release {torch_release}: {home} is {release}. {install}{instead}.")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise UsageError(
            f"{why} and a C++ compiler: {compiler!r} is not found. Fix: install one (Debian: apt-get install g++) or"
            " point CXX at it."
        )
    missing = [name for name in (() if offload else HEADERS) if not (home / "include" / name).is_file()]
    if missing:
        raise UsageError(
            f"{why} with its headers: {home}/include has no {' and no '.join(missing)}. Fix: install the development"
            f" packages of cudart, cublas, cusparse and cusolver for CUDA {release} (docs/install.md)."
        )
    libraries = home / ("lib64" if (home / "lib64").is_dir() else "lib")  # as torch 2.13 chooses
    if not (libraries / "libcudart.so").is_file():
        raise UsageError(
            f"{why} with libcudart.so to link to: there is none in {libraries}. {install}; NVIDIA's packages for pip"
            f" leave that name out: ln -s libcudart.so.{major} {libraries}/libcudart.so"
        )
    return None


def _compiled_before(extension: str) -> bool:
    """Whether DeepSpeed itself was installed with an extension compiled (``DS_BUILD_…=1 pip install deepspeed``)."""
    spec = find_spec("deepspeed")
    return spec is not None and any(Path(spec.origin or "").parent.glob(f"ops/adam/{extension}_op*.so"))


def _minor(release: str) -> str:
    return ".".join(release.split(".")[:2])


PROFILE = Profile(name="cuda", check=check)
