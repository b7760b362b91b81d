# SPDX-License-Identifier: Apache-2.0
"""Hardware profiles: choosing one, its default flags, what it refuses, and the launch environment."""

import asyncio
import importlib
import os
import re
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ngrpo import patches
from ngrpo.config import complete_flags, rules, run
from ngrpo.config.run import RunConfig
from ngrpo.machine.hardware import cpu, profile_for, stand_ins
from ngrpo.machine.upstream.openrlhf_flags import Flags, actions
from ngrpo.trainers.openrlhf import launch
from ngrpo.trainers.openrlhf.launch import conditions_for, worker_env
from ngrpo.trainers.openrlhf.rollout_actor import rollout_actor
from perturbations.errors import UsageError
from tests.conftest import ROOT
from tests.fast.run import check_pairs, run_of

CPU = profile_for("cpu")


@pytest.mark.parametrize(("has_gpu", "name"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_what_torch_sees(monkeypatch: pytest.MonkeyPatch, has_gpu: bool, name: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    assert profile_for("auto").name == name
    with pytest.raises(UsageError, match=r"Unknown hardware 'gpu': choose .*\. Did you mean 'cuda'\?"):
        profile_for("gpu")


@pytest.mark.parametrize("file", ["flash_attn/__init__.py", "flash_attn/cute/__init__.py", "flash_attn_interface.py"])
def test_what_counts_as_flash_attn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str) -> None:
    """Not what releases 4 and 3 install."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not stand_ins.has_flash_attn()
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("raise RuntimeError('nothing is imported to find out')")
    importlib.invalidate_caches()
    assert stand_ins.has_flash_attn() is (file == "flash_attn/__init__.py")


# A whole placement, to which nothing is added.
PLACED = ("--vllm.num_engines", "1")
PLACED += tuple(word for role in ("actor", "ref", "critic", "reward") for word in (f"--{role}.num_gpus_per_node", "1"))


def start(run: RunConfig) -> None:
    """Starts a run as far as its hardware is concerned."""
    flags = complete_flags.with_hardware(Flags(run.openrlhf), run)
    rules.check_hardware(flags, run)
    launch.launch(replace(run, openrlhf=tuple(flags.argv)))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a launch would start, in the place of starting it."""
    done: dict[str, Any] = {}
    monkeypatch.setenv(launch.RUN_ID, "")
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
    held = dict.fromkeys(("ray", "patches"), ("training",) if installed else ("training", "without_flash_attn"))
    assert launched == {**held, "words": [*added, *given, *PLACED]}, "the patch is in this process and in the workers"


def test_conditions_of_a_run_on_a_cpu() -> None:
    run = run_of(perturbation={"name": "neighbor"}, reproducible=True)
    assert conditions_for(CPU, run) == ("training", "cpu", "without_flash_attn", "perturbation", "reproducible")


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


def test_kernels_from_the_hub_are_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in (["flash-attn"], ["flash-attn", "kernels"]):
        hub = ["--ds.attn_implementation", "kernels-community/vllm-flash-attn3"]
        check_pairs(hub, run_of(), hardware="cuda", missing=missing)
    check_pairs(FLASH, run_of(), hardware="cuda", missing=["flash-attn"])
    with pytest.raises(UsageError, match="needs CUDA"):
        check_pairs(FLASH, run_of(), hardware="cpu")
    monkeypatch.setattr(stand_ins, "find_spec", lambda name: SimpleNamespace(origin="") if name == "kernels" else None)
    assert stand_ins.missing() == ["flash-attn"]


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_a_worker_adds_what_it_finds_itself(monkeypatch: pytest.MonkeyPatch, here: bool, there: bool) -> None:
    monkeypatch.setattr(stand_ins, "has_flash_attn", lambda: here)
    settings = run_of(perturbation={"name": "neighbor"})
    profile = profile_for("cuda")
    hook = launch.setup_hook(conditions_for(profile, settings), settings)
    monkeypatch.setattr(stand_ins, "has_flash_attn", lambda: there)
    held: set[str] = set()
    monkeypatch.setattr(patches, "install", held.update)
    monkeypatch.setattr(run, "_current", run.current_run())  # put back after the test
    monkeypatch.setenv("PATH", "/usr/bin")
    hook()
    assert os.environ["PATH"].startswith(os.path.dirname(sys.executable)), "DeepSpeed finds ninja there"
    assert run.current_run() == settings and run.current_run().perturbation.name == "neighbor"
    assert held == {"training", "perturbation", *(() if here and there else ("without_flash_attn",))}


@pytest.mark.parametrize(
    "flags",
    [
        *(RING, FLASH, ["--vllm.enable_sleep"], ["--vllm.gpu_memory_utilization", "0.5"]),
        *(["--vllm.sync_backend", "nccl"], ["--ds.param_dtype", "fp16"], ["--ds.lora.rank", "8"]),
    ],
)
def test_what_the_cpu_cannot_do_is_refused_with_the_flag(flags: list[str]) -> None:
    with pytest.raises(ValueError, match=f"{flags[0]}.* cannot be used with --hardware cpu: "):
        start(run_of(openrlhf=tuple(flags), hardware="cpu"))
    harmless = ["--ds.ring_attn_size=1", "--ds.attn_implementation", "sdpa", "--ds.packing_samples"]
    harmless += ["--vllm.tensor_parallel_size", "2", "--vllm.sync_backend", "gloo"]
    check_pairs(harmless, run_of(), hardware="cpu")


@pytest.mark.parametrize("given", ["sdpa", "eager", None])
def test_packed_samples_keep_the_attention_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """OpenRLHF writes flash_attention_2 over it before it makes its strategy."""
    words = [] if given is None else ["--ds.attn_implementation", given]
    monkeypatch.setattr(sys, "argv", ["openrlhf", "--ds.packing_samples", *words])
    args = SimpleNamespace(ds=SimpleNamespace(attn_implementation="flash_attention_2"))
    seen = stand_ins.attention_as_given(lambda args: args.ds.attn_implementation)(args)
    assert seen == (given or "flash_attention_2")


@pytest.mark.parametrize(
    ("ranks", "backend", "given", "dtype"), [(1, "as it was", "fp32", "float32"), (2, "mp", "bf16", "bfloat16")]
)
def test_an_engine_on_a_cpu_has_processes_as_ranks_and_the_trainers_dtype(
    monkeypatch: pytest.MonkeyPatch, ranks: int, backend: str, given: str, dtype: str
) -> None:
    monkeypatch.setattr(run, "_current", run_of(openrlhf=("--ds.param_dtype", given), hardware="cpu"))

    class Engine:
        async def __init__(self, **kwargs: object) -> None:
            self.kwargs = kwargs

    engine = rollout_actor(Engine)
    made = engine.__new__(engine)
    given_by_openrlhf = {"distributed_executor_backend": "as it was", "dtype": "bfloat16"}
    asyncio.run(made.__init__(tensor_parallel_size=ranks, **given_by_openrlhf))
    assert made.kwargs == {"tensor_parallel_size": ranks, "distributed_executor_backend": backend, "dtype": dtype}


def test_the_port_of_a_models_processes_is_free_and_given_to_no_outgoing_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Actor:
        """As OpenRLHF's: a static method, called of an instance."""

        free_port = cpu.port_below_outgoing(lambda: -1)

    found = {Actor().free_port() for _ in range(50)}
    assert len(found) > 10 and all(20000 <= port < 32768 for port in found)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setattr(cpu, "_PORTS", [taken.getsockname()[1]] * 64)
        assert Actor().free_port() == -1, "the only candidate is taken: the system chooses"


def test_float32_is_the_default_of_a_cpu_and_refused_elsewhere() -> None:
    flags = Flags([]).with_defaults(CPU.default_flags)
    assert Flags(["--reward.remote_url", "reward.py", *flags.argv]).args["ds.param_dtype"] == "fp32"
    with pytest.raises(UsageError, match=r"fp32 cannot be used with --hardware cuda: .*use bf16, or leave it out"):
        check_pairs(["--ds.param_dtype", "fp32"], run_of(), hardware="cuda")
    with pytest.raises(UsageError, match=r"--ds\.tensor_parallel_size 2 .*add --ds\.param_dtype bf16"):
        check_pairs(["--ds.tensor_parallel_size", "2", *flags.argv], run_of(), hardware="cpu")
    CPU.check(Flags(["--ds.tensor_parallel_size", "2", "--ds.param_dtype", "bf16"]))


def test_logical_resources_cover_every_model() -> None:
    given = Flags(["--vllm.num_engines", "2", "--actor.num_gpus_per_node", "2"])
    flags = given.with_defaults(CPU.default_flags)
    resources = CPU.ray_init(flags)
    assert resources["num_gpus"] == 2 + 2 + 1 + 1 + 1
    ranks = given.with_defaults({"--vllm.tensor_parallel_size": "3"}).with_defaults(CPU.default_flags)
    assert CPU.ray_init(ranks)["num_gpus"] == 2 * 3 + 2 + 1 + 1 + 1
    assert resources["num_cpus"] >= resources["num_gpus"] + 3, "asynchronous training: three without a model"


# Read where the command starts or where something is installed, of another program, or no variable.
_NOT_OF_WORKERS = {"RUN_DIR", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "FIRST_NODE", "NAME_OR_FOLDER", "TORCH_INDEX"}
_NOT_OF_WORKERS |= {"VIRTUAL_ENV", "VERL_PLATFORM", "FOLDER_WITH_ITS_SOURCES", "T_0", "A_1", "ROLLOUT_ONLY"}
_NOT_OF_WORKERS |= {"DEMO_STEPS", "CUDA_HOME", "CUDA_PATH"}  # each node has its own toolkit


def test_variables_that_docs_name_reach_the_workers_of_any_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    named = {name for text in texts for name in re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b", text)}
    assert {"VLLM_USE_V2_MODEL_RUNNER", "NGRPO_REWARD_SECONDS", "HF_TOKEN"} <= named
    further = {"HF_HOME", "HF_ENDPOINT", "WANDB_API_KEY", "NCCL_SOCKET_IFNAME", "DS_SKIP_CUDA_CHECK"}
    for name in named - _NOT_OF_WORKERS | further:
        assert name not in worker_env(profile_for("cuda")) or name in os.environ
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
    found = launch.opened(Flags([*words, "--ds.attn_implementation", "sdpa"]), "runs")
    assert found == {**{str(tmp_path / name): name for name in takes_paths}, "runs": "--run-dir"}


def test_the_stand_in_for_flash_attn_is_there_for_an_import_alone() -> None:
    """What it does: tests/stack/test_gradients.py."""
    with stand_ins.flash_attn_stand_in():
        from flash_attn.bert_padding import unpad_input
    assert callable(unpad_input) and "flash_attn" not in sys.modules
