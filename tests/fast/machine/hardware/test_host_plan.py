# SPDX-License-Identifier: Apache-2.0
"""What a run takes of the host: the disk for checkpoints, measured, and what is refused before the start."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ngrpo.machine.hardware import gpu_plan, host_plan
from ngrpo.machine.upstream import placement
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError

BASE = "--actor.model_name_or_path Qwen/Qwen3-0.6B --algo.advantage.estimator group_norm --vllm.num_engines 1"
BASE += " --rollout.n_samples_per_prompt 4 --reward.remote_url r.py --actor.num_gpus_per_node 1 --ckpt.path kept"


@pytest.fixture(autouse=True)
def in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("openrlhf")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.chdir(tmp_path)


def args_of(more: str = "") -> dict[str, Any]:
    return Flags([*BASE.split(), *more.split()]).args


# 596,049,920 parameters: 14 bytes each, 3 times.
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", "no checkpoint is saved before the end"),
        ("--ckpt.save_steps 20", "checkpoints in kept take 25 GB, 3 of 8.3 GB each (one every 20 steps, --ckpt.max_"),
        ("--ckpt.save_steps 20 --ds.param_dtype fp32", "take 29 GB, 3 of 9.5 GB each"),  # 16 bytes
        ("--ckpt.save_steps 20 --ckpt.save_hf --ckpt.max_num 1", "take 8 GB, 1 of 8.3 GB each"),
        ("--ckpt.save_steps 20 --ckpt.save_hf", "; each leaves a model of 1.2 GB, and OpenRLHF deletes none of these"),
        ("--ckpt.save_steps 20 --ckpt.save_hf --ckpt.disable_ds", "take below 1 GB (one every 20 steps, --ckpt"),
        ("--ckpt.save_steps 20 --ds.lora.rank 8", "take 4 GB, 3 of 1.3 GB each"),  # 1.19 of weights, 0.06 of adapters
        # 0.44 billion weights of 0.516 bytes, 0.16 of two, and the adapters.
        ("--ckpt.save_steps 20 --ds.lora.rank 8 --ds.load_in_4bit", "take 2 GB, 3 of 0.6 GB each"),
    ],
)
def test_the_disk_that_checkpoints_take_is_said(more: str, said: str) -> None:
    assert said in host_plan.about_checkpoints(args_of(more))


def test_checkpoints_without_room_are_refused() -> None:
    many = args_of("--ckpt.save_steps 20 --ckpt.max_num 100000000")
    with pytest.raises(UsageError, match=r"^--ckpt\.path kept: 100000000 checkpoints take \d+ GB, .* Fix: a smaller"):
        host_plan.check_disk(many, None)
    assert host_plan.check_disk(args_of("--ckpt.max_num 100000000"), None) is None, "none is saved"
    elsewhere = host_plan.check_disk(many, placement.planned("8x80", "--dry-run"))
    assert elsewhere is not None
    assert "another machine" in elsewhere


def test_checkpoints_that_will_be_replaced_count_as_room(tmp_path: Path) -> None:
    size = host_plan.checkpoint_bytes(args_of("--ckpt.save_steps 20"))
    assert size is not None
    beyond = int(host_plan.disk_usage(tmp_path).free // size) + 2
    args = args_of(f"--ckpt.save_steps 20 --ckpt.max_num {beyond}")
    with pytest.raises(UsageError, match=f"{beyond} checkpoints take"):
        host_plan.check_disk(args, None)
    (tmp_path / "kept").mkdir()
    with (tmp_path / "kept" / "old").open("wb") as old:
        old.truncate(int(3 * size))  # a hole, which takes no room
    assert host_plan.check_disk(args, None) is None


@pytest.mark.parametrize(
    ("files", "gibibytes"),
    [
        ({"own": "0::/"}, None),
        ({"own": "0::/", "memory.max": "max"}, None),
        ({"own": "0::/", "memory.max": f"{3 * 2**30}"}, 3),
        ({"own": "0::/job/step", "job/memory.max": f"{2 * 2**30}", "job/step/memory.max": "max"}, 2),
        ({"own": "4:cpu:/x\n9:cpu,memory:/x", "memory/x/memory.limit_in_bytes": f"{5 * 2**30}"}, 5),
        ({"own": "9:memory:/x", "memory/memory.limit_in_bytes": f"{2**63 - 4096}"}, None),
    ],
)
def test_the_hosts_memory_is_what_cgroups_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], gibibytes: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(host_plan, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host_plan, "_OWN_CGROUP", tmp_path / "own")
    expected = psutil.virtual_memory().total if gibibytes is None else gibibytes * 2**30
    assert host_plan.memory_limit() == expected


def test_an_offload_beyond_the_hosts_memory_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """7,615,616,512 parameters. Moments 8P, sums of gradients 2P and the engine asleep 2P: 85.1 GiB.

    Page-locked: the float32 weights and gradients, each 28.4 GiB and thus 32, and a copy of 14.2 GiB, thus 16.
    """
    card = placement.planned("1x80", "--dry-run")
    monkeypatch.setattr(placement, "here", lambda: card)
    monkeypatch.setattr(host_plan, "_CGROUPS", tmp_path)
    (tmp_path / "own").write_text("0::/")
    monkeypatch.setattr(host_plan, "_OWN_CGROUP", tmp_path / "own")
    (tmp_path / "memory.max").write_text(f"{4 * 2**30}")
    more = "--actor.model_name_or_path deepseek-ai/DeepSeek-R1-Distill-Qwen-7B --ds.adam_offload --vllm.enable_sleep"
    args = args_of(f"{more} --train.colocate_all --ref.num_gpus_per_node 1")
    assert host_plan.about_memory(args, card).startswith("165 GiB of the host's memory")
    told = r"^--ds.adam_offload, --vllm.enable_sleep: the run takes 165 GiB of the host's memory, .* may have 4 GiB"
    with pytest.raises(UsageError, match=told):
        host_plan.check_memory(args, card)
    assert host_plan.check_memory(args_of(), card) is None
    assert host_plan.check_memory(args, placement.planned("1x40", "--dry-run")) is not None, "another machine's"


def test_states_that_leave_the_gpu_are_three_page_locked_buffers() -> None:
    """1,235,814,400 parameters: the master weights and each moment are 4.6 GiB, and take 8. The engine has 2.3."""
    model = "--actor.model_name_or_path meta-llama/Llama-3.2-1B --ds.enable_sleep --vllm.enable_sleep"
    args = args_of(f"{model} --train.colocate_all --ref.num_gpus_per_node 1")
    assert host_plan.host_bytes(args, 80 * 2**30) / 2**30 == pytest.approx(3 * 8 + 2.3, abs=0.05)


def test_the_moving_average_has_a_copy_on_the_gpu_and_float32_on_the_host() -> None:
    args = args_of("--actor.model_name_or_path meta-llama/Llama-3.2-1B --ref.num_gpus_per_node 1")
    with_average = {**args, "train.enable_ema": True}
    (group,) = [group for group in placement.groups(args) if placement.ACTOR in group.models]
    parts, parts_with_average = (gpu_plan.parts_of(group, settings, 80 * 2**30) for settings in (args, with_average))
    (added,) = [part for part in parts_with_average if part not in parts]
    assert added.phases == (2 * 1_235_814_400,) * 4
    assert added.host == 4 * 1_235_814_400


def test_several_ranks_need_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = placement.planned("2x80", "--dry-run")
    monkeypatch.setattr(placement, "here", lambda: cards)
    two = args_of("--train.colocate_all --ref.num_gpus_per_node 2 --actor.num_gpus_per_node 2 --vllm.num_engines 2")
    monkeypatch.setattr(host_plan, "_LEAST_SHARED", 2**60)
    with pytest.raises(UsageError, match=r"^/dev/shm has \d+ MiB, and ranks on several GPUs need .* --ipc host"):
        host_plan.check_shared_memory(two, cards)
    assert host_plan.check_shared_memory(args_of("--train.colocate_all --ref.num_gpus_per_node 1"), cards) is None
    monkeypatch.setattr(host_plan, "_LEAST_SHARED", 1)
    assert host_plan.check_shared_memory(two, cards) is None


CHECKPOINT = """
import os, sys, torch, deepspeed
# The attribute deepspeed.comm.torch is torch itself, so the module of that name is looked up.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
deepspeed.init_distributed(dist_backend="gloo")
for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4))).to(dtype)
    adam = {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True, "fused": True}}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": name == "bf16"}, "optimizer": adam}
    config["zero_optimization"] = {"stage": 2}
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    engine.backward(engine(torch.ones(1, 512, dtype=dtype)).float().mean())
    engine.step()
    engine.save_checkpoint(name)
"""


@pytest.mark.more
def test_the_size_of_a_checkpoint_is_that_of_deepspeeds_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1% for a model of 2^20 parameters."""
    pytest.importorskip("deepspeed")
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    subprocess.run([sys.executable, "-c", CHECKPOINT], cwd=tmp_path, check=True, capture_output=True)
    for name in ("bf16", "fp32"):
        written = sum(file.stat().st_size for file in (tmp_path / name).rglob("*.pt"))
        args = args_of("--ckpt.save_steps 20") | {"ds.param_dtype": name}
        planned = host_plan.checkpoint_bytes(args)
        assert planned is not None
        assert written / 2**20 == pytest.approx(planned / 596_049_920, rel=0.01), name
