# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's fused Adam, compiled with pip's CUDA toolkit for an H100: the headers that `--hardware cuda` looks for.

Slow: `make test-all`. Installs 1.6 GB, unless CUDA_HOME has all of it; needs no GPU, and links nothing.
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
PARTS = "cuda-toolkit[nvcc,crt,nvvm,cccl,cudart,cublas,cusparse,cusolver]==13.0.*"


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toolkit, in a folder of its own."""
    given = os.environ.get("CUDA_HOME")
    if given and all((Path(given) / "include" / name).is_file() for name in cuda.HEADERS):
        return Path(given)
    folder = tmp_path_factory.mktemp("cuda")
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--target", str(folder), PARTS]
    subprocess.run(pip, check=True)
    return folder / "nvidia" / "cu13"


def command(home: Path, source: str, headers: Path) -> Sequence[str | Path]:
    """What torch would call for a source file of DeepSpeed's; without linking."""
    import sysconfig

    from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder
    from torch.utils.cpp_extension import include_paths

    builder = FusedAdamBuilder()
    folders = [*include_paths(), sysconfig.get_path("include"), headers]
    words = [f"-I{builder.deepspeed_src_path(path)}" for path in builder.include_paths()]
    # A torch for CPUs has CUDA's headers but one, which the first definition stands for.
    words += ["-DC10_USING_CUSTOM_GENERATED_MACROS", "-DTORCH_EXTENSION_NAME=fused_adam", "-std=c++20", "-O0"]
    words += [word for folder in folders for word in ("-isystem", str(folder))]
    compiler = ["g++", "-fsyntax-only"]
    if source.endswith(".cu"):
        arguments = [word for word in builder.nvcc_args() if word.startswith("-D")]
        compiler = [str(home / "bin" / "nvcc"), "-c", "-gencode=arch=compute_90,code=sm_90", *arguments]
        compiler += ["-Xcompiler", "-fPIC", "-o", os.devnull]
    return [*compiler, *words, builder.deepspeed_src_path(source)]


def test_the_fused_adam_compiles_with_these_headers_and_with_no_fewer(home: Path, tmp_path: Path) -> None:
    from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder

    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    kernel = next(source for source in FusedAdamBuilder().sources() if source.endswith(".cu"))
    headers = home / "include"
    done = subprocess.run(command(home, kernel, headers), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

    def without(header: str) -> str:
        folder = tmp_path / header
        shutil.copytree(headers, folder, copy_function=os.symlink, ignore=shutil.ignore_patterns(header))
        # nvcc adds its own folder of headers, so that the C++ compiler looks at what torch includes.
        words = command(home, "csrc/adam/fused_adam_frontend.cpp", folder)
        probe = tmp_path / f"{header}.cpp"
        probe.write_text("#include <ATen/cuda/CUDAContext.h>\n")
        found = subprocess.run([*words[:-1], probe], capture_output=True, text=True, check=False)
        return found.stderr if found.returncode else "compiled"

    with ThreadPoolExecutor(2) as pool:
        for header, said in zip(cuda.HEADERS, pool.map(without, cuda.HEADERS)):
            assert f"{header}: No such file" in said, (header, said[-2000:])
