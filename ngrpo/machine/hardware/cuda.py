# SPDX-License-Identifier: Apache-2.0
"""The CUDA profile: OpenRLHF and vLLM as they are, and whether DeepSpeed can compile its Adam here."""

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from ngrpo.machine.hardware import Profile
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError

_DEFAULT_HOME = Path("/usr/local/cuda")
# The last major release with minor releases that DeepSpeed treats as equal (op_builder/builder.py).
_MINORS_MIX = 12
# What the CUDA code of DeepSpeed's fused Adam includes through torch 2.13 (ATen/cuda/CUDAContextLight.h).
HEADERS = ("cuda_runtime_api.h", "cusparse.h", "cublas_v2.h", "cublasLt.h", "cusolverDn.h")


def toolkit() -> tuple[Path | None, str | None]:
    """The CUDA toolkit that torch 2.13 would compile with, and its nvcc's release, as "13.0"; None where unknown."""
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
    """Raises ``UsageError`` where DeepSpeed 0.19.6 could not compile its Adam; returns why it could not check, or None.

    DeepSpeed tries it once all models are loaded. The Adam of ``--ds.adam_offload`` is compiled against the toolkit
    too, and from CUDA 13 on it needs torch's own minor release. The nodes of a Ray cluster have their own toolkits.
    """
    import torch

    if flags.has("--help"):
        return None
    if os.environ.get("RAY_ADDRESS", "local") != "local":
        return f"not checked: the CUDA toolkits of the nodes of the Ray cluster at {os.environ['RAY_ADDRESS']}."
    if torch.version.cuda is None:
        return "not checked: torch is built for a CPU here, so neither a GPU nor its toolkit can be looked at."
    offload = flags.has("--ds.adam_offload")
    subject, extension = ("--ds.adam_offload", "cpu_adam") if offload else ("DeepSpeed's fused Adam", "fused_adam")
    deepspeed = find_spec("deepspeed")
    if deepspeed and any(Path(deepspeed.origin or "").parent.glob(f"ops/adam/{extension}_op*.so")):
        return None  # DS_BUILD_…=1 pip install deepspeed
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if re.search(r"\d[a-z]", listed):
        raise UsageError(
            f"TORCH_CUDA_ARCH_LIST={listed}: {subject} is compiled for these architectures on first use, and DeepSpeed"
            " 0.19.6 reads only numbers, such as 9.0. Fix: unset the variable, or leave out the letters."
        )
    (home, release), (major, minor) = toolkit(), torch.version.cuda.split(".")[:2]
    why = f"{subject} is compiled on first use, for which DeepSpeed needs the CUDA toolkit"
    install = (
        f"Fix: install the CUDA toolkit {major}.{minor}, the release of this torch, and set CUDA_HOME to its folder"
        " (docs/install.md)"
    )
    if home is None:
        raise UsageError(
            f"{why}: none is found, neither by CUDA_HOME nor as nvcc on PATH nor in {_DEFAULT_HOME}. {install}."
        )
    if release is None:
        raise UsageError(f"{why}: {home} has no bin/nvcc that runs. {install}.")
    exactly = offload and int(release.split(".")[0]) > _MINORS_MIX and os.environ.get("DS_SKIP_CUDA_CHECK") != "1"
    if release != f"{major}.{minor}" if exactly else release.split(".")[0] != major:
        instead = f", or set DS_SKIP_CUDA_CHECK=1 if {release} will do" if exactly else ""
        raise UsageError(f"{why} of torch's own release {torch.version.cuda}: {home} is {release}. {install}{instead}.")
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
    return None


PROFILE = Profile(name="cuda", check=check)
