# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed compiles its Adam on first use: what is missing for that is said before anything starts."""

import sys
from pathlib import Path

import pytest

from ngrpo.machine.hardware import cuda, profile_for
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError

PLAIN, OFFLOAD = Flags(["--train.seed", "1"]), Flags(["--ds.adam_offload"])


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As on a machine whose torch is built for CUDA 13.0, without a toolkit or a compiler: the only folder on PATH."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(cuda, "_DEFAULT_HOME", tmp_path / "usr-local-cuda")
    for name in ("CUDA_HOME", "CUDA_PATH", "RAY_ADDRESS", "CXX", "DS_SKIP_CUDA_CHECK"):
        monkeypatch.delenv(name, raising=False)
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    return programs


def program(path: Path, says: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "{says}"\n')
    path.chmod(0o755)
    return path


def toolkit(folder: Path, release: str) -> Path:
    program(folder / "bin" / "nvcc", f"Cuda compilation tools, release {release}, V{release}.88")
    (folder / "include").mkdir(exist_ok=True)
    for name in cuda.HEADERS:
        (folder / "include" / name).touch()
    return folder


def refusal(flags: Flags = PLAIN) -> str:
    with pytest.raises(UsageError) as caught:
        profile_for("cuda").check(flags)
    return str(caught.value)


def test_no_toolkit(bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = refusal()
    assert told.startswith("DeepSpeed's fused Adam is compiled on first use") and "\n" not in told
    for part in ("none is found", "Fix: install the CUDA toolkit 13.0", "CUDA_HOME", "docs/install.md"):
        assert part in told
    assert refusal(OFFLOAD).startswith("--ds.adam_offload is compiled on first use"), "it needs the toolkit as well"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert f"{tmp_path} has no bin/nvcc that runs" in refusal()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a+PTX")  # DeepSpeed ends with a ValueError, after all models
    assert refusal().startswith("TORCH_CUDA_ARCH_LIST=8.0 9.0a+PTX:") and "leave out the letters" in refusal()


@pytest.mark.parametrize("place", ["CUDA_HOME", "CUDA_PATH", "PATH", "usr-local-cuda"])
def test_a_toolkit_is_found_where_torch_looks(
    bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    program(bare / "g++")
    home = toolkit(tmp_path / "usr-local-cuda" if place == "usr-local-cuda" else tmp_path / "elsewhere", "13.0")
    if place == "PATH":
        monkeypatch.setenv("PATH", f"{bare}:{home / 'bin'}")
    elif place.startswith("CUDA"):
        monkeypatch.setenv(place, str(home))
    assert cuda.toolkit() == (home, "13.0")
    profile_for("cuda").check(PLAIN)
    profile_for("cuda").check(OFFLOAD)


def test_releases(bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The fused Adam wants the same major release, the offloaded one the very same."""
    program(bare / "g++")
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", "12.8")))
    assert "of torch's own release 13.0" in refusal() and "is 12.8" in refusal(OFFLOAD)
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", "13.1")))
    profile_for("cuda").check(PLAIN)
    assert "DS_SKIP_CUDA_CHECK=1" in refusal(OFFLOAD)
    monkeypatch.setenv("DS_SKIP_CUDA_CHECK", "1")
    profile_for("cuda").check(OFFLOAD)


def test_a_compiler_or_a_header_is_missing(bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in an image that has nvcc and the runtime alone."""
    header = cuda.HEADERS[-1]
    home = toolkit(tmp_path / "cuda", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert "'g++' is not found" in refusal()
    program(bare / "g++")
    (home / "include" / header).unlink()
    told = refusal()
    assert f"{home}/include has no {header}. Fix: " in told and "\n" not in told
    profile_for("cuda").check(OFFLOAD)  # the Adam of the CPU includes none of them


@pytest.mark.parametrize("reason", ["torch for CPU", "cluster", "help", "built with DeepSpeed"])
def test_nothing_is_asked_where_nothing_is_compiled_here(
    bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str
) -> None:
    assert "none is found" in refusal()
    if reason == "torch for CPU":
        monkeypatch.setattr("torch.version.cuda", None)
    elif reason == "cluster":
        monkeypatch.setenv("RAY_ADDRESS", "auto")
    elif reason == "built with DeepSpeed":
        compiled = tmp_path / "deepspeed" / "ops" / "adam" / "fused_adam_op.cpython-311-x86_64-linux-gnu.so"
        compiled.parent.mkdir(parents=True)
        compiled.touch()
        (tmp_path / "deepspeed" / "__init__.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "deepspeed", raising=False)  # may have been imported by another test
    profile_for("cuda").check(Flags(["--help"]) if reason == "help" else PLAIN)
