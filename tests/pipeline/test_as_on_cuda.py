# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's own weight sync, its hybrid order and vLLM's sleep with our hooks, on a CPU (as_on_cuda.py has how).

After each sync an engine's weights are those that were sent, to the bit, own parameters of a perturbation and noise
included; what was computed of the old ones is computed anew, once; and the next rollout is replayed exactly.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.as_on_cuda import rehearse
from tests.pipeline.harness import GAP, LOUD
from tests.support.tiny_folder import tiny_folder

NCCL = ["--vllm.sync_backend", "nccl"]
HYBRID = [*NCCL, "--train.colocate_all", "--vllm.enable_sleep", "--ds.enable_sleep"]
NO_REFERENCE = ["--algo.kl.init_coef", "0"]
HRPO = ["--perturbation", "hrpo", "--perturbation.gate_lr", "0.02", "--perturbation.lambda_lr", "4"]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> str:
    """Its head is its embedding; vLLM holds its q, k and v, with their biases, as one matrix."""
    folder, sizes = tmp_path_factory.mktemp("tied"), {"hidden_size": 64, "intermediate_size": 128}
    options = {**sizes, "num_attention_heads": 2, "tie_word_embeddings": True, "initializer_range": 0.2}
    return tiny_folder(folder, smollm2, "qwen2", **options)


def run(
    folder: Path, model: str, *flags: str, engines: int = 1, by: str, v2: bool = False
) -> tuple[list[dict[str, Any]], list[Any]]:
    """The steps of a training whose syncs all went as they must, and its journal."""
    result, journal = rehearse(folder, model, *LOUD, *flags, v2=v2)
    assert result.returncode == 0, result.stdout[-6000:]
    steps = json.loads((folder / "run" / "summary.json").read_text())["steps"]
    syncs = [line["parameters"] for line in journal if line["what"] == "sync"]
    assert len(steps) >= 2 and len(syncs) >= 2
    names = sorted(name for parameters in syncs for name in parameters)
    processes = {line["process"] for line in journal if line["what"] == "prepare"}
    assert len(processes) == engines
    for process in processes:
        lines = [line for line in journal if line["process"] == process]
        assert sorted(line["name"] for line in lines if line["what"] == "update" and line["by"] == by) == names
        prepared = [line for line in lines if line["what"] == "prepare"]
        assert len(prepared) == 1 + len(syncs), "once at the start, and once for each sync"
        assert not any(line["wrong"] for line in prepared), prepared
    return steps, journal


def assert_exact(steps: list[dict[str, Any]]) -> None:
    assert all(step["shift"] > 0.0 for step in steps)
    assert max(step["gap_perturbed_max"] for step in steps) <= GAP
    assert max(step.get("gap_plain_max", 0.0) for step in steps) <= GAP


def assert_slept_well(journal: list[dict[str, Any]]) -> None:
    """All weights and the KV cache slept, nothing of ours did, and a sync found the weights awake and the cache asleep.

    A weight or a key that is read while it sleeps is NaN, and makes the rollout's log-probabilities so.
    """
    nights = [line for line in journal if line["what"] == "sleep"]
    assert len(nights) >= 3
    assert all(line["ours"] > 5 and not line["lost"] and not line["awake"] for line in nights), nights
    awake: dict[int, set[str]] = {}
    for line in journal:
        tags = awake.setdefault(line["process"], {"weights", "kv_cache"})
        if line["what"] == "sleep":
            tags.clear()
        elif line["what"] == "wake_up":
            tags |= set(line["tags"])
        elif line["what"] == "update":
            assert tags == {"weights"}
        elif line["what"] == "prepare":
            assert "weights" in tags


def test_hybrid_with_cuda_ipc(tmp_path: Path, tied: str) -> None:
    """A perturbation's own parameters learn so fast that a sync which left them out would show."""
    flags = [*HYBRID, *NO_REFERENCE, *HRPO, "--vllm.enable_prefix_caching"]
    steps, journal = run(tmp_path, tied, *flags, by="update_weight_cuda_ipc")
    assert_slept_well(journal)
    assert_exact(steps)
    updated = {line["name"] for line in journal if line["what"] == "update"}
    assert {f"perturbation.{name}" for name in ("w_r", "w_i", "lambda_shift")} <= updated


def test_hybrid_with_the_v2_runner(tmp_path: Path, tied: str) -> None:
    """V2 is vLLM's default on a GPU. Its kernels are interpreted here, so that the responses are short."""
    short = ["--rollout.max_new_tokens", "4", "--rollout.n_samples_per_prompt", "2", "--train.batch_size", "8"]
    flags = [*HYBRID, *NO_REFERENCE, "--perturbation", "neighbor", "--perturbation.rate", "0.5", *short]
    steps, journal = run(tmp_path, tied, *flags, by="update_weight_cuda_ipc", v2=True)
    assert_slept_well(journal)
    assert_exact(steps)
    assert all(line["v2"] for line in journal if line["what"] == "sleep")


LORA = ["--ds.lora.rank", "8", "--ds.lora.alpha", "16", "--actor.adam.lr", "1e-2"]


def test_hybrid_with_lora(tmp_path: Path, tied: str) -> None:
    """Engines get merged weights by CUDA IPC, and the parameters of a perturbation; their other weights stay right."""
    flags = [*HYBRID, *NO_REFERENCE, *HRPO, *LORA, "--vllm.enable_prefix_caching"]
    steps, journal = run(tmp_path, tied, *flags, by="update_weight_cuda_ipc")
    assert_slept_well(journal)
    assert_exact(steps)
    updated = {line["name"] for line in journal if line["what"] == "update"}
    assert "model.layers.1.mlp.down_proj.weight" in updated and "perturbation.w_r" in updated
    assert "model.embed_tokens.weight" not in updated


@pytest.mark.slow
def test_two_engines_over_a_group_with_lora_and_noise(tmp_path: Path, tied: str) -> None:
    """Noise on norms, which have no adapters: they are sent as well."""
    flags = [*NCCL, *NO_REFERENCE, *LORA, "--vllm.num_engines", "2", "--perturbation", "gumbel"]
    flags += ["--policy_noise", "aqn", "--policy_noise.stages", "3", "--policy_noise.steps", "3"]
    _, journal = run(tmp_path, tied, *flags, engines=2, by="update_weight")
    updated = {line["name"] for line in journal if line["what"] == "update"}
    assert "model.layers.1.input_layernorm.weight" in updated
    assert "model.layers.1.self_attn.q_proj.weight" in updated


@pytest.mark.slow
def test_hybrid_of_two_gpus_with_zero_3(tmp_path: Path, random_model: str) -> None:
    """An engine finds the handle of the trainer's rank on its own GPU; the table of neighbors follows the weights."""
    two = ["--actor.num_gpus_per_node", "2", "--ref.num_gpus_per_node", "2", "--vllm.num_engines", "2"]
    flags = [*HYBRID, *two, "--ds.zero_stage", "3", "--perturbation", "neighbor", "--perturbation.rate", "0.5"]
    batches = ["--rollout.micro_batch_size", "4", "--train.micro_batch_size", "4"]
    steps, journal = run(tmp_path, random_model, *flags, *batches, engines=2, by="update_weight_cuda_ipc")
    assert_slept_well(journal)
    assert_exact(steps)


@pytest.mark.slow
def test_two_engines_over_a_group(tmp_path: Path, tied: str) -> None:
    """With noise, which the trainer has not: so of the weights alone. The first sync comes before the first rollout."""
    perturbed = ["--perturbation", "tarpo", "--perturbation.density", "token", "--policy_noise", "psn"]
    flags = [*NCCL, *NO_REFERENCE, "--vllm.num_engines", "2", *perturbed]
    _, journal = run(tmp_path, tied, *flags, engines=2, by="update_weight")
    assert any(line["name"].startswith("perturbation.") for line in journal if line["what"] == "update")


@pytest.mark.slow
def test_asynchronous_over_a_group(tmp_path: Path, random_model: str) -> None:
    flags = [*NCCL, *NO_REFERENCE, "--train.async_enable", "--perturbation", "gumbel"]
    steps, _ = run(tmp_path, random_model, *flags, by="update_weight")
    assert_exact(steps)
