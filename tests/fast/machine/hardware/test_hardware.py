# SPDX-License-Identifier: Apache-2.0
"""Hardware profiles: choosing one, its default flags, what it refuses, and the launch environment."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ngrpo import cli, patches
from ngrpo.config import rules, run
from ngrpo.config.complete_run import CompleteRun
from ngrpo.config.run import RunConfig
from ngrpo.machine.hardware import cpu, profile_for, stand_ins
from ngrpo.machine.upstream.openrlhf_flags import Flags, actions
from ngrpo.trainers.openrlhf import launch
from ngrpo.trainers.openrlhf.launch import worker_env
from perturbations.errors import UsageError
from tests.support.run import check_pairs, run_of

CPU = profile_for("cpu")


@pytest.mark.parametrize(("has_gpu", "name"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_what_torch_sees(monkeypatch: pytest.MonkeyPatch, has_gpu: bool, name: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    assert profile_for("auto").name == name
    with pytest.raises(UsageError, match=r"Unknown hardware 'gpu': choose .*\. Did you mean 'cuda'\?"):
        profile_for("gpu")


@pytest.fixture
def unusable_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A torch for CUDA 13.0 that sees no GPU, and a driver that lists one."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 535.104.05\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_a_gpu_that_torch_cannot_use_is_no_training_on_the_cpu(
    unusable_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openrlhf")
    line = "train --dry-run --task arithmetic --model smollm2-135m --preset grpo --rollout.n_samples_per_prompt 4"
    assert cli.main([*line.split(), "--run-dir", "runs/none"]) == 2
    told = capsys.readouterr().err
    for words in ("a GPU with driver 535.104.05", "built for CUDA 13.0, cannot use it", "Fix: ", "--hardware cpu"):
        assert words in told
    assert profile_for("cpu").name == "cpu"
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert profile_for("auto").name == "cpu", "the user hides the GPU"


def test_a_gpu_without_bfloat16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: ((8, 0), (7, 5))[index])
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: ("A100", "Tesla T4")[index])
    with pytest.raises(UsageError, match=r"^GPU 1, Tesla T4, has compute capability 7\.5 .*bfloat16.* Fix: .*8\.0"):
        profile_for("cuda").check(Flags())


@pytest.mark.parametrize("nested", [True, False])
def test_experts_on_blackwell_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nested: bool) -> None:
    """vLLM's FlashInfer kernels repack the experts, and a weight sync writes into them as they were before."""
    text = {"num_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text} if nested else text))
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "NVIDIA B200")
    experts = Flags(["--actor.model_name_or_path", str(tmp_path)])
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (10, 0))
    with pytest.raises(UsageError, match=r"is a mixture of experts, and GPU 0, NVIDIA B200, .*10\.0.*#42821.* Fix: "):
        profile_for("cuda").check(experts)
    profile_for("cuda").check(Flags(["--actor.model_name_or_path", "smollm2-135m"]))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (9, 0))
    profile_for("cuda").check(experts)


# A whole placement, to which nothing is added.
PLACED = ("--vllm.num_engines", "1")
PLACED += tuple(word for role in ("actor", "ref", "critic", "reward") for word in (f"--{role}.num_gpus_per_node", "1"))


def start(run: RunConfig) -> None:
    """Starts a run as far as its hardware is concerned."""
    complete = CompleteRun(run=run, flags=Flags(run.openrlhf)).on_machine()
    rules.check_hardware(complete)
    launch.launch(replace(run, openrlhf=tuple(complete.flags.argv)))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a launch would start, in the place of starting it."""
    done: dict[str, Any] = {}
    monkeypatch.setenv(launch.RUN_ID, "")
    monkeypatch.setattr(run, "_current", run.current_run())  # put back after the test
    monkeypatch.setattr(launch, "_start_ray", lambda profile, flags, conditions, settings: done.update(ray=conditions))
    monkeypatch.setattr(patches, "install", lambda conditions: done.update(patches=conditions))
    monkeypatch.setattr(launch, "_run", lambda words: done.update(words=words))
    return done


@pytest.mark.parametrize(
    ("installed", "given", "added"),
    [
        (False, ("--train.seed", "1"), ("--ds.attn_implementation", "sdpa")),
        (False, ("--ds.attn_implementation", "eager"), ()),
        (True, ("--ds.packing_samples",), ()),
    ],
)
def test_what_cuda_starts_with_and_without_flash_attn(
    monkeypatch: pytest.MonkeyPatch, launched: dict[str, Any], installed: bool, given: Any, added: Any
) -> None:
    monkeypatch.setattr(stand_ins, "has_flash_attn", lambda: installed)
    start(run_of(openrlhf=(*given, *PLACED), hardware="cuda"))
    conditions = ("training", "any_adam") if installed else ("training", "any_adam", "without_flash_attn")
    held = dict.fromkeys(("ray", "patches"), conditions)
    assert launched == {**held, "words": [*added, *given, *PLACED]}, "the patch is in this process and in the workers"


def test_a_flash_attn_that_cannot_be_imported_counts_as_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launched: dict[str, Any]
) -> None:
    """As a build for another torch, which Python finds."""
    package = tmp_path / "flash_attn" / "__init__.py"
    package.parent.mkdir()
    package.write_text("raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(stand_ins, "flash_attn_failure", stand_ins.flash_attn_failure.__wrapped__)
    assert stand_ins.is_flash_attn_installed()
    assert not stand_ins.has_flash_attn()
    start(run_of(openrlhf=PLACED, hardware="cuda"))
    assert launched["words"] == ["--ds.attn_implementation", "sdpa", *PLACED]
    assert "without_flash_attn" in launched["ray"]
    told = profile_for("cuda").notes(Flags(PLACED))[0]
    assert "cannot be imported (ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c10)" in told
    assert launch.explanation(ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c10"))


RING = ["--ds.ring_attn_size", "2"]
FLASH = ["--ds.attn_implementation", "flash_attention_2"]


@pytest.mark.parametrize("flags", [RING, FLASH])
def test_cuda_without_flash_attn_refuses_what_needs_it(
    monkeypatch: pytest.MonkeyPatch, launched: dict[str, Any], flags: list[str]
) -> None:
    monkeypatch.setattr(stand_ins, "has_flash_attn", lambda: False)
    monkeypatch.setattr(stand_ins, "find_spec", lambda name: None)
    expected = f"^{' '.join(flags)} cannot be used with an environment without flash-attn: .* Fix: .*docs/install.md"
    with pytest.raises(UsageError, match=expected):
        start(run_of(openrlhf=tuple(flags), hardware="cuda"))
    assert launched == {}


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_a_worker_adds_what_it_finds_itself(monkeypatch: pytest.MonkeyPatch, here: bool, there: bool) -> None:
    monkeypatch.setattr(stand_ins, "has_flash_attn", lambda: here)
    settings = run_of(perturbation={"name": "neighbor"}, hardware="cuda")
    hook = launch.setup_hook(settings.training_conditions, settings)
    monkeypatch.setattr(stand_ins, "is_flash_attn_installed", lambda: there)
    held: set[str] = set()
    monkeypatch.setattr(patches, "install", held.update)
    monkeypatch.setattr(run, "_current", run.current_run())  # put back after the test
    monkeypatch.setenv("PATH", "/usr/bin")
    hook()
    assert os.environ["PATH"].startswith(os.path.dirname(sys.executable)), "DeepSpeed finds ninja there"
    assert run.current_run() == settings
    assert run.current_run().perturbation.name == "neighbor"
    assert held == {"training", "perturbation", "any_adam", *(() if here and there else ("without_flash_attn",))}


@pytest.mark.parametrize(
    "flags",
    [
        *(RING, FLASH, ["--vllm.enable_sleep"], ["--vllm.gpu_memory_utilization", "0.5"]),
        *(["--vllm.sync_backend", "nccl"], ["--ds.param_dtype", "fp16"]),
    ],
)
def test_what_the_cpu_cannot_do_is_refused_with_the_flag(flags: list[str]) -> None:
    with pytest.raises(ValueError, match=f"{flags[0]}.* cannot be used with --hardware cpu: "):
        start(run_of(openrlhf=tuple(flags), hardware="cpu"))
    harmless = ["--ds.ring_attn_size=1", "--ds.attn_implementation", "sdpa", "--ds.packing_samples"]
    harmless += ["--vllm.tensor_parallel_size", "2", "--vllm.sync_backend", "gloo"]
    check_pairs(harmless, run_of(), hardware="cpu")


def test_float32_is_the_default_of_a_cpu_and_refused_elsewhere() -> None:
    flags = Flags([]).with_defaults(CPU.default_flags)
    assert Flags(["--reward.remote_url", "reward.py", *flags.argv]).args["ds.param_dtype"] == "fp32"
    with pytest.raises(UsageError, match=r"fp32 cannot be used with --hardware cuda: .*use bf16, or leave it out"):
        check_pairs(["--ds.param_dtype", "fp32"], run_of(), hardware="cuda")
    with pytest.raises(UsageError, match=r"--ds\.tensor_parallel_size 2 .*add --ds\.param_dtype bf16"):
        check_pairs(["--ds.tensor_parallel_size", "2", *flags.argv], run_of(), hardware="cpu")
    CPU.check(Flags(["--ds.tensor_parallel_size", "2", "--ds.param_dtype", "bf16"]))


def test_variables_reach_the_workers_of_any_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ("VLLM_USE_V2_MODEL_RUNNER", "NGRPO_REWARD_SECONDS", "DS_SKIP_CUDA_CHECK")
    ours += ("GLOO_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT", "FI_PROVIDER", "UCX_NET_DEVICES")
    for name in (*ours, "HF_TOKEN", "HF_HOME", "HF_ENDPOINT", "WANDB_API_KEY", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "as here")
        assert worker_env(profile_for("cuda")).get(name) == "as here", name
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert worker_env(CPU)["OMP_NUM_THREADS"] == "7", "what the user exported wins"
    assert worker_env(CPU)["DS_ACCELERATOR"] == "cpu"
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.1")
    assert "VLLM_HOST_IP" not in worker_env(profile_for("cuda")), "that of this node"


def test_every_path_that_another_node_opens_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each flag of OpenRLHF that takes a path; what is no path here is a name of the hub or an address."""
    names = [name for action in actions() for name in action.option_strings]
    takes_paths = [name for name in names if re.search("path$|_dir$|file|url|dataset$", name)]
    assert len(takes_paths) >= 9
    monkeypatch.chdir(tmp_path)
    words = []
    for name in takes_paths:
        (tmp_path / name).mkdir()
        words += [name, f"{tmp_path / name},https://judge.example/score,owner/name"]
    (tmp_path / "runs").mkdir()
    found = launch.local_paths(Flags([*words, "--ds.attn_implementation", "sdpa"]), "runs")
    assert found == {**{str(tmp_path / name): name for name in takes_paths}, "runs": "--run-dir"}


def test_a_library_that_vllm_s_kernels_are_linked_with(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu.check(Flags([]))
    monkeypatch.setattr(cpu, "_NUMA", "libnuma-of-another-machine.so.1")
    with pytest.raises(UsageError, match=r"libnuma-of-another-machine\.so\.1 is missing: .* apt-get install libnuma1"):
        cpu.check(Flags([]))
