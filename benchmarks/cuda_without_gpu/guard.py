# SPDX-License-Identifier: Apache-2.0
"""The device guard for CUDA, which PyTorch's build for CPUs lacks: without it no tensor can be on ``cuda``."""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import torch

_SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>);
"""


@functools.cache
def load() -> None:
    """Compiles the guard, which takes a second, and loads it into this process for good.

    Raises:
        RuntimeError: where PyTorch has a guard of its own, or where the compiler fails.
    """
    from torch.utils.cpp_extension import include_paths

    if torch.backends.cuda.is_built():
        raise RuntimeError("this PyTorch is built for CUDA: what runs without a GPU needs the build for CPUs.")
    lib = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "guard.cpp")
        library = Path(folder, "guard.so")
        source.write_text(_SOURCE)
        options = ["-std=c++20", "-O1", "-shared", "-fPIC", *(f"-I{path}" for path in include_paths())]
        link_options = [f"-L{lib}", "-lc10", f"-Wl,-rpath,{lib}"]
        command = ["g++", *options, str(source), "-o", str(library), *link_options]
        compiler = subprocess.run(command, capture_output=True, text=True)
        if compiler.returncode:
            raise RuntimeError(f"the device guard does not compile: {compiler.stderr[-2000:]}")
        ctypes.CDLL(str(library))
