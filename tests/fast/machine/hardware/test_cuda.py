# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed compiles its Adam on first use: where it cannot, PyTorch's takes its place, and a line says so."""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ngrpo.config import run_notes
from ngrpo.config.complete_run import CompleteRun
from ngrpo.machine.hardware import cuda, profile_for
from ngrpo.machine.upstream import placement
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.trainers.openrlhf.launch import worker_env
from perturbations.errors import UsageError
from tests.support.run import check_pairs, run_of

PLAIN = Flags(["--train.seed", "1"])
OFFLOAD = Flags(["--ds.adam_offload"])
MOVED = ("--ds.zero_stage", "3", "--ds.enable_sleep")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As on a machine whose torch is built for CUDA 13.0, without a toolkit or a compiler: the only folder on PATH.

    Python's headers are there.
    """
    headers = tmp_path / "python"
    headers.mkdir()
    (headers / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(headers))
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(cuda, "_DEFAULT_HOME", tmp_path / "usr-local-cuda")
    for name in ("CUDA_HOME", "CUDA_PATH", "RAY_ADDRESS", "CXX", "DS_SKIP_CUDA_CHECK"):
        monkeypatch.delenv(name, raising=False)
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(sys, "executable", str(programs / "python"))  # whose folder may have ninja
    return programs


def program(path: Path, says: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o755)
    return path


def toolkit(folder: Path, release: str) -> Path:
    """A toolkit that compiles for compute capability 8.0 and 9.0, with its headers and libraries."""
    line = f"Cuda compilation tools, release {release}, V{release}.88"
    program(folder / "bin" / "nvcc", f'[ "$1" = -V ] && echo "{line}" || echo "compute_80\ncompute_90"')
    for file in (*(f"include/{name}" for name in cuda.HEADERS), "lib64/libcudart.so", "lib64/libcurand.so"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).touch()
    return folder


@pytest.fixture
def complete(bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with all that DeepSpeed needs: the folder of its toolkit."""
    program(bare / "g++")
    program(bare / "ninja")
    home = toolkit(tmp_path / "cuda", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert replacement() == replacement(OFFLOAD) == ""
    return home


def replacement(flags: Flags = PLAIN) -> str:
    """The line about PyTorch's Adam; empty where DeepSpeed's is compiled."""
    profile_for("cuda").check(flags)
    return "".join(profile_for("cuda").notes(flags))


def optimizer(*, offload: bool = False) -> dict[str, Any]:
    """The optimizer that OpenRLHF's own function gives to DeepSpeed, with ours around it."""
    pytest.importorskip("deepspeed")
    package = find_spec("openrlhf")
    if package is None or package.origin is None:
        pytest.skip("OpenRLHF is not installed")
    # By its path, since openrlhf.utils imports flash-attn.
    module = runpy.run_path(str(Path(package.origin).parent / "utils" / "deepspeed" / "deepspeed_utils.py"))
    config = cuda.with_available_adam(module["get_train_ds_config"])(
        offload=False, adam_offload=offload, optim_config={"type": "AdamW", "params": {"lr": 1e-6}}
    )
    return config["optimizer"]["params"]


def test_without_a_toolkit_pytorchs_adam_takes_the_place(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = replacement()
    assert told.startswith("PyTorch's fused AdamW takes the place of DeepSpeed's fused Adam")
    assert "\n" not in told
    assert "there is no CUDA toolkit, neither by CUDA_HOME nor as nvcc on PATH nor in" in told
    assert "the place of the Adam of --ds.adam_offload, which" in replacement(OFFLOAD), "it needs the toolkit as well"
    words = ["--reward.remote_url", "r.py", "--algo.advantage.estimator", "group_norm"]
    words += ["--rollout.n_samples_per_prompt", "4", "--actor.model_name_or_path", "Qwen/Qwen3-0.6B"]
    run = run_of(openrlhf=tuple(words), hardware="cuda", machine=placement.planned("1x80", "--dry-run"))
    complete = CompleteRun(run=run, flags=Flags(words)).on_machine()
    assert told in run_notes.all_notes(complete), "a start and a dry run print it"


@pytest.mark.parametrize("place", ["CUDA_HOME", "CUDA_PATH", "PATH", "usr-local-cuda"])
def test_a_toolkit_is_found_where_torch_looks(
    bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    program(bare / "g++")
    program(bare / "ninja")
    home = toolkit(tmp_path / "usr-local-cuda" if place == "usr-local-cuda" else tmp_path / "elsewhere", "13.0")
    if place == "PATH":
        monkeypatch.setenv("PATH", f"{bare}:{home / 'bin'}")
    elif place.startswith("CUDA"):
        monkeypatch.setenv(place, str(home))
    assert cuda.toolkit() == (home, "13.0")
    assert replacement() == replacement(OFFLOAD) == ""


@pytest.mark.more
def test_what_deepspeed_is_given(complete: Path) -> None:
    assert optimizer() == optimizer(offload=True) == {"lr": 1e-6}
    (complete / "lib64" / "libcurand.so").unlink()
    replaced = {"lr": 1e-6, "torch_adam": True, "fused": True}
    assert optimizer() == {"lr": 1e-6}
    assert optimizer(offload=True) == replaced
    (complete / "bin" / "nvcc").unlink()
    assert optimizer() == optimizer(offload=True) == replaced


def test_releases(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused Adam wants the same major release, the offloaded one the very same."""
    toolkit(complete, "12.8")
    assert f"the toolkit {complete} is 12.8, and torch is built for 13.0" in replacement()
    assert "is 12.8" in replacement(OFFLOAD)
    toolkit(complete, "13.1")
    assert replacement() == ""
    assert "is 13.1" in replacement(OFFLOAD)
    monkeypatch.setenv("DS_SKIP_CUDA_CHECK", "1")
    assert replacement(OFFLOAD) == ""


@pytest.mark.parametrize("name", ["g++", "ninja"])
def test_a_program_is_missing(bare: Path, complete: Path, name: str) -> None:
    (bare / name).unlink()
    assert replacement().endswith(f"{name} is not on PATH.")
    assert replacement(OFFLOAD).endswith("is not on PATH.")


def test_a_header_or_a_library_is_missing(complete: Path) -> None:
    """As in an image that has nvcc and the runtime alone."""
    (complete / "lib64" / "libcurand.so").unlink()
    assert replacement() == ""
    assert replacement(OFFLOAD).endswith(f"neither {complete}/lib64 nor {complete}/lib has libcurand.so.")
    header = complete / "include" / cuda.HEADERS[-1]
    header.unlink()
    assert replacement().endswith(f"{complete}/include has no {header.name}.")
    assert "libcurand.so" in replacement(OFFLOAD), "the Adam of the CPU includes none of these headers"


def test_python_s_headers_are_missing(complete: Path, tmp_path: Path) -> None:
    (tmp_path / "python" / "Python.h").unlink()
    for flags in (PLAIN, OFFLOAD):
        assert f"{tmp_path / 'python'} has no Python.h" in replacement(flags)


def test_nvcc_does_not_have_the_gpus_architecture(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: ((9, 0), (12, 1))[index])
    assert replacement().endswith("nvcc 13.0 does not compile for this machine's GPUs (compute_121).")
    assert replacement(OFFLOAD) == "", "it has no CUDA code"


def test_zero_3_with_sleep_has_deepspeeds_own_adam_or_none(bare: Path) -> None:
    """DeepSpeed 0.19.6 asserts there that the states are its fused Adam's."""
    told = "--ds.enable_sleep with --ds.zero_stage 3 needs DeepSpeed's fused Adam, .* there is no CUDA toolkit.* Fix: "
    with pytest.raises(UsageError, match=told):
        profile_for("cuda").check(Flags(MOVED))
    assert profile_for("cuda").notes(Flags(MOVED)) == []
    assert "any_adam" not in run_of(openrlhf=MOVED, hardware="cuda").training_conditions
    assert "any_adam" in run_of(openrlhf=(*MOVED, "--ds.adam_offload"), hardware="cuda").training_conditions


def test_muon_with_slices_of_gradients_is_refused() -> None:
    """DeepSpeed 0.19.6 raises ValueError for both, once the models are loaded."""
    for flags in (["--ds.zero_stage", "3"], ["--ds.adam_offload"]):
        for optim in ("--actor.optim", "--critic.optim"):
            with pytest.raises(UsageError, match=rf"^{optim} muon cannot be used with {' '.join(flags)}: .* whole"):
                check_pairs([optim, "muon", *flags], run_of(), hardware="cuda")
    check_pairs(["--actor.optim", "muon", "--ds.zero_stage", "2", "--ds.enable_sleep"], run_of(), hardware="cuda")


@pytest.mark.parametrize("flags", ["--ds.param_dtype fp16", "--ds.param_dtype fp32", "--vllm.sync_backend gloo"])
def test_what_openrlhf_has_no_engine_for_on_cuda(flags: str) -> None:
    """Its engines are in bfloat16, and the first weight sync would end with an assertion; gloo is not used there."""
    with pytest.raises(UsageError, match=f"^{flags} cannot be used with --hardware cuda"):
        check_pairs(flags.split(), run_of(), hardware="cuda")


def test_architectures_that_deepspeed_cannot_read_reach_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set to nothing, DeepSpeed asks the visible GPUs; it reads numbers alone, and images set letters."""
    for listed in ("9.0a", "Hopper", "native", "90", "8.0,9.0"):
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
        assert worker_env(profile_for("cuda"))["TORCH_CUDA_ARCH_LIST"] == ""


@pytest.mark.parametrize("reason", ["torch for CPU", "cluster", "help", "built with DeepSpeed"])
def test_nothing_is_asked_where_nothing_is_compiled_here(
    bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str
) -> None:
    flags = Flags(["--help"]) if reason == "help" else Flags(MOVED)
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
        assert profile_for("cuda").notes(PLAIN) == []
    profile_for("cuda").check(flags)
