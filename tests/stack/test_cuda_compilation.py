# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's fused Adam, compiled with pip's CUDA toolkit for an H100: the headers that `--hardware cuda` looks for.

The test is slow (`make test-all`): it installs 1.6 GB, unless CUDA_HOME has all of it. It needs no GPU, and links
nothing.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ngrpo.machine.hardware import cuda

pytestmark = pytest.mark.slow
TOOLKIT = "cuda-toolkit[nvcc,crt,nvvm,cccl,cudart,cublas,cusparse,cusolver]==13.0.*"


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the toolkit: CUDA_HOME if it has every header, else one that pip installs into."""
    cuda_home = os.environ.get("CUDA_HOME")
    if cuda_home:
        include = Path(cuda_home) / "include"
        if all((include / name).is_file() for name in cuda.HEADERS):
            return Path(cuda_home)
    folder = tmp_path_factory.mktemp("cuda")
    pip_install = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip_install, "--target", str(folder), TOOLKIT], check=True)
    return folder / "nvidia" / "cu13"


def command(home: Path, source: str, headers: Path) -> Sequence[str | Path]:
    """The call of the compiler that torch would make for a source file of DeepSpeed's; without linking."""
    import sysconfig

    from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder
    from torch.utils.cpp_extension import include_paths

    builder = FusedAdamBuilder()
    if source.endswith(".cu"):
        compiler = [str(home / "bin" / "nvcc"), "-c", "-gencode=arch=compute_90,code=sm_90"]
        compiler += [argument for argument in builder.nvcc_args() if argument.startswith("-D")]
        compiler += ["-Xcompiler", "-fPIC", "-o", os.devnull]
    else:
        compiler = ["g++", "-fsyntax-only"]
    options = [f"-I{builder.deepspeed_src_path(path)}" for path in builder.include_paths()]
    # A torch for CPUs lacks one of CUDA's headers, which the first definition stands for.
    options += ["-DC10_USING_CUSTOM_GENERATED_MACROS", "-DTORCH_EXTENSION_NAME=fused_adam", "-std=c++20", "-O0"]
    for folder in (*include_paths(), sysconfig.get_path("include"), headers):
        options += ["-isystem", str(folder)]
    return [*compiler, *options, builder.deepspeed_src_path(source)]


def test_the_fused_adam_compiles_with_these_headers_and_with_no_fewer(home: Path, tmp_path: Path) -> None:
    from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder

    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    kernel = next(source for source in FusedAdamBuilder().sources() if source.endswith(".cu"))
    headers = home / "include"
    compilation = subprocess.run(command(home, kernel, headers), capture_output=True, text=True, check=False)
    assert compilation.returncode == 0, compilation.stderr[-3000:]

    def compile_without(header: str) -> str:
        """The compiler's errors without one of the headers."""
        folder = tmp_path / header
        shutil.copytree(headers, folder, copy_function=os.symlink, ignore=shutil.ignore_patterns(header))
        probe = tmp_path / f"{header}.cpp"
        probe.write_text("#include <ATen/cuda/CUDAContext.h>\n")
        # nvcc adds its own folder of headers, so the C++ compiler compiles what torch includes.
        frontend_command = command(home, "csrc/adam/fused_adam_frontend.cpp", folder)
        probe_command = [*frontend_command[:-1], probe]
        compilation = subprocess.run(probe_command, capture_output=True, text=True, check=False)
        return compilation.stderr if compilation.returncode else "compiled"

    with ThreadPoolExecutor(2) as pool:
        for header, errors in zip(cuda.HEADERS, pool.map(compile_without, cuda.HEADERS)):
            assert f"{header}: No such file" in errors, (header, errors[-2000:])
