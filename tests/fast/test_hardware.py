"""Hardware profiles: choosing one, its default flags, what it refuses, and the launch environment."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from ngrpo.hardware import profile_for
from ngrpo.openrlhf_flags import Flags
from ngrpo.trainer.launch import conditions_for, worker_env
from ngrpo.trainer.run_settings import RunSettings

CPU = profile_for("cpu")
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


@pytest.mark.parametrize("name", ["cpuu", "tpu", ""])
def test_unknown_hardware(name: str) -> None:
    with pytest.raises(ValueError, match=f"Unknown hardware '{name}'.*'auto', 'cpu' or 'cuda'"):
        profile_for(name)


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(ValueError, match="Did you mean 'cuda'"):
        profile_for("cuda0")


@needs_torch
def test_auto_is_what_torch_sees() -> None:
    import torch

    assert profile_for("auto").name == ("cuda" if torch.cuda.is_available() else "cpu")


def test_default_flags_are_added_only_where_absent_and_told() -> None:
    user = ["--vllm.num_engines=2", "--ds.attn_implementation", "eager", "--ds.adam_offload"]
    flags = Flags(user).with_defaults(CPU.default_flags)
    assert flags.words == [*flags.added, *user]
    assert flags.value("--vllm.num_engines") == "2"
    assert flags.value("--ds.attn_implementation") == "eager"
    assert "--ds.adam_offload" not in flags.added and "--vllm.enforce_eager" in flags.added


def test_cuda_is_stock_openrlhf() -> None:
    profile = profile_for("cuda")
    perturbed = RunSettings(perturbation_spec={"name": "neighbor"})
    assert conditions_for(profile, RunSettings()) == () and profile.env == {} == profile.default_flags
    assert conditions_for(profile, perturbed) == ("perturbation",)
    assert conditions_for(CPU, perturbed) == ("cpu", "perturbation")
    assert conditions_for(CPU, RunSettings(reproducible=True)) == ("cpu", "reproducible")


@pytest.mark.parametrize(
    "flags",
    [
        ["--vllm.sync_backend", "nccl"],
        ["--vllm.tensor_parallel_size=2"],
        ["--ds.packing_samples"],
        ["--ds.attn_implementation", "flash_attention_2"],
        ["--vllm.enable_sleep"],
        ["--vllm.gpu_memory_utilization", "0.5"],
        ["--ds.param_dtype", "fp16"],
        ["--ds.lora.rank", "8"],
    ],
)
def test_what_the_cpu_cannot_do_is_refused_with_the_flag(flags: list[str]) -> None:
    name = flags[0].split("=")[0]
    with pytest.raises(ValueError, match=f"{name}.* cannot be used with --hardware cpu: "):
        CPU.check(Flags(flags))


def test_harmless_values_pass() -> None:
    CPU.check(Flags(["--vllm.tensor_parallel_size", "1", "--ds.ring_attn_size=1", "--vllm.sync_backend", "gloo"]))


def test_a_missing_compiler_is_said_before_the_start(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"no-such-compiler.*CPU Adam"):
        CPU.check(Flags(["--ds.adam_offload"]))


def test_logical_resources_cover_every_model() -> None:
    given = Flags(["--vllm.num_engines", "2", "--actor.num_gpus_per_node", "2"])
    flags = given.with_defaults(CPU.default_flags)
    resources = CPU.ray_init(flags)
    assert resources["num_gpus"] == 2 + 2 + 1 + 1 + 1
    assert resources["num_cpus"] > resources["num_gpus"]


def test_worker_environment(monkeypatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    settings = RunSettings(perturbation_spec={"rate": 0.1, "name": "neighbor"})
    env = worker_env(CPU, ("cpu", "perturbation"), settings)
    assert env["NGRPO_CONDITIONS"] == "cpu,perturbation"
    assert env["NGRPO_PERTURBATION"] == '{"name": "neighbor", "rate": 0.1}'
    assert env["NCCL_DEBUG"] == "INFO" and env["OMP_NUM_THREADS"] == "7", "what the user exported wins"
    assert env["DS_ACCELERATOR"] == "cpu"


def test_importing_is_light() -> None:
    program = (
        "import sys, ngrpo.hardware, ngrpo.trainer.launch;"
        "heavy = {'torch', 'vllm', 'openrlhf', 'ray', 'deepspeed', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@needs_torch
def test_flash_attention_stand_in_round_trip() -> None:
    import torch

    from ngrpo.hardware.flash_attn_stand_in import during_import, pad_input, unpad_input

    values = torch.arange(8.0).reshape(2, 4, 1)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    rows, indices, cumulative, longest, lengths = unpad_input(values, mask)
    assert rows.flatten().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert cumulative.tolist() == [0, 3, 5] and cumulative.dtype == torch.int32
    assert (longest, lengths.tolist()) == (3, [3, 2])
    assert torch.equal(pad_input(rows, indices, 2, 4), values * mask[..., None])

    with during_import():
        from flash_attn.bert_padding import unpad_input as found

        assert found is unpad_input
    assert "flash_attn" not in sys.modules
