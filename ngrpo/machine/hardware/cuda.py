# SPDX-License-Identifier: Apache-2.0
"""The CUDA profile: OpenRLHF and vLLM as they are, and which Adam DeepSpeed can have on this machine."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ngrpo.machine.hardware import Profile, stand_ins
from ngrpo.machine.models import architecture
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.machine.upstream.patch import around
from perturbations.errors import UsageError

_DEFAULT_HOME = Path("/usr/local/cuda")
# The last major release with minor releases that DeepSpeed treats as equal (op_builder/builder.py).
_MINORS_MIX = 12
_LEAST_CAPABILITY = 8  # the first with bfloat16
_BLACKWELL = 10  # the first on which vLLM 0.29 prefers FlashInfer for experts (fused_moe/oracle/unquantized.py)
_MODEL = "--actor.model_name_or_path"
# What the CUDA code of DeepSpeed's fused Adam includes through torch 2.13 (ATen/cuda/CUDAContextLight.h).
HEADERS = ("cuda_runtime_api.h", "cusparse.h", "cublas_v2.h", "cublasLt.h", "cusolverDn.h")
# What DeepSpeed's two Adams are linked with (op_builder/builder.py, torch's cpp_extension.py).
LIBRARIES = ("libcudart.so",)
LIBRARIES_OF_OFFLOADED = ("libcudart.so", "libcurand.so")


def toolkit() -> tuple[Path | None, str | None]:
    """The CUDA toolkit that torch 2.13 would compile with, and its nvcc's release, as "13.0"; None where unknown."""
    home = _toolkit_folder()
    if home is None:
        return None, None
    try:
        process = subprocess.run([home / "bin" / "nvcc", "-V"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return home, None
    match = re.search(r"release (\d+\.\d+)", process.stdout)
    return home, match and match[1]


def _toolkit_folder() -> Path | None:
    """The folder of the CUDA toolkit, in the order of torch's cpp_extension.py; None where there is none."""
    variable = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if variable:
        return Path(variable)
    nvcc = shutil.which("nvcc")
    home = Path(nvcc).parent.parent if nvcc else _DEFAULT_HOME
    return home if home.is_dir() else None


def installed_driver() -> str | None:
    """The release of the driver of this machine's GPUs, as ``nvidia-smi`` tells it; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0] or None


def check_unused() -> None:
    """Raises ``UsageError`` for a GPU that a torch for CUDA cannot use, unless CUDA_VISIBLE_DEVICES hides it.

    To be called where torch sees no GPU.
    """
    import torch

    if torch.version.cuda is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return
    driver = installed_driver()
    if driver is None:
        return
    try:
        torch.cuda.init()
        reason = "it names no reason"
    except (AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
    raise UsageError(
        f"there is a GPU with driver {driver}, and torch, built for CUDA {torch.version.cuda}, cannot use it: {reason}"
        f" Fix: install a driver for CUDA {torch.version.cuda} (docs/install.md), or a torch for this driver. To use"
        " the CPU, give --hardware cpu."
    )


def obstacle(*, offload: bool) -> str | None:
    """What DeepSpeed 0.19.6 lacks here to compile its fused Adam, or that of ``--ds.adam_offload``; None for nothing.

    DeepSpeed compiles on first use, once all models are loaded. From CUDA 13 on, its offloaded Adam needs torch's own
    minor release.
    """
    import torch

    deepspeed = find_spec("deepspeed")
    extension = "cpu_adam" if offload else "fused_adam"
    if deepspeed and any(Path(deepspeed.origin or "").parent.glob(f"ops/adam/{extension}_op*.so")):
        return None  # it came compiled
    home, release = toolkit()
    if home is None:
        return f"there is no CUDA toolkit, neither by CUDA_HOME nor as nvcc on PATH nor in {_DEFAULT_HOME}"
    if release is None:
        return f"{home} has no bin/nvcc that runs"
    torch_major, torch_minor = (torch.version.cuda or "").split(".")[:2]
    major = release.split(".")[0]
    needs_same_minor = offload and int(major) > _MINORS_MIX and os.environ.get("DS_SKIP_CUDA_CHECK") != "1"
    fits_torch = release == f"{torch_major}.{torch_minor}" if needs_same_minor else major == torch_major
    if not fits_torch:
        return f"the toolkit {home} is {release}, and torch is built for {torch.version.cuda}"
    search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for program in (os.environ.get("CXX", "g++"), "ninja"):
        if shutil.which(program, path=search_path) is None:
            return f"{program} is not on PATH"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return f"Python's headers are missing: {sysconfig.get_path('include')} has no Python.h"
    if not offload:
        missing = [name for name in HEADERS if not (home / "include" / name).is_file()]
        if missing:
            return f"{home}/include has no {' and no '.join(missing)}"
    folders = [home / name for name in ("lib64", "lib")]
    for name in LIBRARIES_OF_OFFLOADED if offload else LIBRARIES:
        if not any((folder / name).is_file() for folder in folders):
            return f"neither {folders[0]} nor {folders[1]} has {name}"
    if not offload:
        unknown = sorted(_architectures() - _architectures_of(home))
        if unknown:
            return f"nvcc {release} does not compile for this machine's GPUs ({', '.join(unknown)})"
    return None


def _architectures() -> set[str]:
    """The architectures of the visible GPUs, as ``compute_90``."""
    import torch

    capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    return {f"compute_{major}{minor}" for major, minor in capabilities}


def _architectures_of(home: Path) -> set[str]:
    """The architectures that a toolkit compiles for."""
    command = [home / "bin" / "nvcc", "--list-gpu-arch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def is_moved_by_deepspeed(flags: Flags) -> bool:
    """Whether DeepSpeed moves the states to the host and back, which ZeRO-3 does for its own fused Adam alone."""
    sleeps = flags.has("--ds.enable_sleep") and not flags.has("--ds.adam_offload")
    return sleeps and flags.or_default("--ds.zero_stage") == "3"


def _why_not_checked() -> str | None:
    """Why the machines that train cannot be checked from this one; None where this machine trains."""
    import torch

    if os.environ.get("RAY_ADDRESS", "local") != "local":
        return f"not checked: the CUDA toolkits of the nodes of the Ray cluster at {os.environ['RAY_ADDRESS']}."
    if torch.version.cuda is None:
        return "not checked: torch is built for a CPU here, so neither a GPU nor its toolkit can be looked at."
    return None


def check(flags: Flags) -> str | None:
    """Raises ``UsageError`` for GPUs without bfloat16, or that compute experts wrongly, and for a missing Adam.

    Returns why it could not check, or None.
    """
    import torch

    if flags.has("--help"):
        return None
    not_checked = _why_not_checked()
    if not_checked is not None:
        return not_checked
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        if major < _LEAST_CAPABILITY:
            raise UsageError(
                f"GPU {index}, {torch.cuda.get_device_name(index)}, has compute capability {major}.{minor} and thus no"
                f" bfloat16, in which OpenRLHF's engines compute. Fix: use GPUs of {_LEAST_CAPABILITY}.0 or later, such"
                " as an A100, or --hardware cpu."
            )
        model = flags.value(_MODEL) or ""
        if major >= _BLACKWELL and architecture.has_experts(model):
            raise UsageError(
                f"{_MODEL} {model} is a mixture of experts, and GPU {index}, {torch.cuda.get_device_name(index)}, has"
                f" compute capability {major}.{minor}: vLLM computes its experts with FlashInfer there, which a weight"
                " sync leaves wrong or fails over (vllm-project/vllm#42821). Fix: use GPUs of 9.0 or earlier, such as"
                " an H200, or a model without experts."
            )
    missing = obstacle(offload=False) if is_moved_by_deepspeed(flags) else None
    if missing is not None:
        raise UsageError(
            "--ds.enable_sleep with --ds.zero_stage 3 needs DeepSpeed's fused Adam, which is compiled on first use:"
            f" {missing}. Fix: install the CUDA toolkit of torch's release {torch.version.cuda} (docs/install.md), use"
            " --ds.zero_stage 2, or add --ds.adam_offload."
        )
    return None


def notes(flags: Flags) -> list[str]:
    """Lines about the attention and the Adam that take the place of others on this machine."""
    lines = []
    failure = stand_ins.flash_attn_failure() if stand_ins.is_flash_attn_installed() else None
    if failure is not None:
        lines.append(
            f"flash-attn is installed and cannot be imported ({failure}), so the trainer's attention is PyTorch's own."
            " Install a build for this torch, or uninstall it (docs/install.md)."
        )
    if _why_not_checked() is None and not is_moved_by_deepspeed(flags):
        offload = flags.has("--ds.adam_offload")
        missing = obstacle(offload=offload)
        if missing is not None:
            name = "the Adam of --ds.adam_offload" if offload else "DeepSpeed's fused Adam"
            lines.append(f"PyTorch's fused AdamW takes the place of {name}, which cannot be compiled here: {missing}.")
    return lines


@around
def with_available_adam(original: Callable[..., dict[str, Any]], *args: object, **kwargs: object) -> dict[str, Any]:
    """`get_train_ds_config`: PyTorch's fused AdamW, by DeepSpeed's own switch, where its own cannot be compiled.

    It runs on the node that trains, which need not have the driver's toolkit.
    """
    config = original(*args, **kwargs)
    offload = config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    if "optimizer" in config and obstacle(offload=offload) is not None:
        config["optimizer"]["params"] |= {"torch_adam": True, "fused": True}
    return config


# DeepSpeed reads numbers alone: it fails over 9.0a, Hopper, native, 90 and 8.0,9.0. Set to nothing, it compiles for the
# GPUs that a process sees.
PROFILE = Profile(name="cuda", check=check, notes=notes, forced_env={"TORCH_CUDA_ARCH_LIST": ""})
