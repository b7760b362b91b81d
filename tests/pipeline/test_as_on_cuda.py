# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's own weight sync, its hybrid order and vLLM's sleep with our hooks, on a CPU (as_on_cuda.py says how).

After each sync an engine's weights are those that were sent, to the bit, own parameters of a perturbation and noise
included. What was computed from the old weights is computed anew, once, and the next rollout is replayed exactly.
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
LORA = ["--ds.lora.rank", "8", "--ds.lora.alpha", "16", "--actor.adam.lr", "1e-2"]
HRPO = ["--perturbation", "hrpo", "--perturbation.gate_lr", "0.02", "--perturbation.lambda_lr", "4"]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> str:
    """Its head is its embedding; vLLM holds its q, k and v, with their biases, as one matrix."""
    return tiny_folder(
        tmp_path_factory.mktemp("tied"),
        smollm2,
        "qwen2",
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )


def entries_of(journal: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    """The journal's entries of one kind: "sync", "update", "prepare", "sleep" or "wake_up"."""
    return [entry for entry in journal if entry["event"] == event]


def run(
    folder: Path, model: str, *flags: str, engines: int = 1, by: str, v2: bool = False
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The steps and the journal of a training in which every engine got every sync whole.

    Args:
        folder: is written to.
        model: is trained.
        flags: of the training.
        engines: how many engines it has.
        by: OpenRLHF's method by which an engine must get each parameter.
        v2: whether engines have vLLM's V2 model runner.
    """
    result, journal = rehearse(folder, model, *LOUD, *flags, v2=v2)
    assert result.returncode == 0, result.stdout[-6000:]
    steps = json.loads((folder / "run" / "summary.json").read_text())["steps"]
    assert len(steps) >= 2
    syncs = entries_of(journal, "sync")
    assert len(syncs) >= 2
    sent_names: list[str] = []
    for sync in syncs:
        sent_names += sync["parameters"]

    processes = {entry["process"] for entry in entries_of(journal, "prepare")}
    assert len(processes) == engines
    for process in processes:
        entries = [entry for entry in journal if entry["process"] == process]
        updates = [entry for entry in entries_of(entries, "update") if entry["by"] == by]
        assert sorted(update["name"] for update in updates) == sorted(sent_names)
        prepared = entries_of(entries, "prepare")
        assert len(prepared) == 1 + len(syncs), "once at the start, and once for each sync"
        assert not any(entry["wrong"] for entry in prepared), prepared
    return steps, journal


def updated_names(journal: list[dict[str, Any]]) -> set[str]:
    return {update["name"] for update in entries_of(journal, "update")}


def assert_exact(steps: list[dict[str, Any]]) -> None:
    for step in steps:
        assert step["shift"] > 0.0
        assert step["gap_perturbed_max"] <= GAP
        assert step.get("gap_plain_max", 0.0) <= GAP


def assert_slept_well(journal: list[dict[str, Any]]) -> None:
    """All weights and the KV cache slept, no tensor of a perturbation did, and a sync found only the weights awake.

    A weight or a key that is read while it sleeps is NaN, and makes the rollout's log-probabilities NaN.
    """
    nights = entries_of(journal, "sleep")
    assert len(nights) >= 3
    for night in nights:
        assert night["ours"] > 5, night
        assert not night["lost"], night
        assert not night["awake"], night

    awake_by_process: dict[int, set[str]] = {}
    for entry in journal:
        awake = awake_by_process.setdefault(entry["process"], {"weights", "kv_cache"})
        if entry["event"] == "sleep":
            awake.clear()
        elif entry["event"] == "wake_up":
            awake |= set(entry["tags"])
        elif entry["event"] == "update":
            assert awake == {"weights"}
        elif entry["event"] == "prepare":
            assert "weights" in awake


def test_hybrid_with_cuda_ipc(tmp_path: Path, tied: str) -> None:
    """A perturbation's own parameters learn so fast that a sync which left them out would show."""
    flags = [*HYBRID, *NO_REFERENCE, *HRPO, "--vllm.enable_prefix_caching"]
    steps, journal = run(tmp_path, tied, *flags, by="update_weight_cuda_ipc")
    assert_slept_well(journal)
    assert_exact(steps)
    assert updated_names(journal) >= {"perturbation.w_r", "perturbation.w_i", "perturbation.lambda_shift"}


def test_hybrid_with_the_v2_runner(tmp_path: Path, tied: str) -> None:
    """V2 is vLLM's default on a GPU. Its kernels are interpreted here, so the responses are short."""
    short = ["--rollout.max_new_tokens", "4", "--rollout.n_samples_per_prompt", "2", "--train.batch_size", "8"]
    flags = [*HYBRID, *NO_REFERENCE, "--perturbation", "neighbor", "--perturbation.rate", "0.5", *short]
    steps, journal = run(tmp_path, tied, *flags, by="update_weight_cuda_ipc", v2=True)
    assert_slept_well(journal)
    assert_exact(steps)
    assert all(night["v2"] for night in entries_of(journal, "sleep"))


def test_hybrid_with_lora(tmp_path: Path, tied: str) -> None:
    """Engines get merged weights by CUDA IPC, and the parameters of a perturbation; their other weights stay right."""
    flags = [*HYBRID, *NO_REFERENCE, *HRPO, *LORA, "--vllm.enable_prefix_caching"]
    steps, journal = run(tmp_path, tied, *flags, by="update_weight_cuda_ipc")
    assert_slept_well(journal)
    assert_exact(steps)
    updated = updated_names(journal)
    assert "model.layers.1.mlp.down_proj.weight" in updated
    assert "perturbation.w_r" in updated
    assert "model.embed_tokens.weight" not in updated


@pytest.mark.slow
def test_two_engines_over_a_group_with_lora_and_noise(tmp_path: Path, tied: str) -> None:
    """The noise is on norms, which have no adapters: they are sent as well."""
    flags = [*NCCL, *NO_REFERENCE, *LORA, "--vllm.num_engines", "2", "--perturbation", "gumbel"]
    flags += ["--policy_noise", "aqn", "--policy_noise.stages", "3", "--policy_noise.steps", "3"]
    _, journal = run(tmp_path, tied, *flags, engines=2, by="update_weight")
    updated = updated_names(journal)
    assert "model.layers.1.input_layernorm.weight" in updated
    assert "model.layers.1.self_attn.q_proj.weight" in updated


@pytest.mark.slow
def test_hybrid_of_two_gpus_with_zero_3(tmp_path: Path, random_model: str) -> None:
    """An engine finds the handle of the trainer's rank on its own GPU; the table of neighbors follows the weights."""
    two_gpus = ["--actor.num_gpus_per_node", "2", "--ref.num_gpus_per_node", "2", "--vllm.num_engines", "2"]
    flags = [*HYBRID, *two_gpus, "--ds.zero_stage", "3", "--perturbation", "neighbor", "--perturbation.rate", "0.5"]
    batches = ["--rollout.micro_batch_size", "4", "--train.micro_batch_size", "4"]
    steps, journal = run(tmp_path, random_model, *flags, *batches, engines=2, by="update_weight_cuda_ipc")
    assert_slept_well(journal)
    assert_exact(steps)


@pytest.mark.slow
def test_two_engines_over_a_group(tmp_path: Path, tied: str) -> None:
    """The first sync comes before the first rollout. The trainer lacks the engines' noise, so no gap is compared."""
    flags = [*NCCL, *NO_REFERENCE, "--vllm.num_engines", "2"]
    flags += ["--perturbation", "tarpo", "--perturbation.density", "token", "--policy_noise", "psn"]
    _, journal = run(tmp_path, tied, *flags, engines=2, by="update_weight")
    assert any(name.startswith("perturbation.") for name in updated_names(journal))


@pytest.mark.slow
def test_asynchronous_over_a_group(tmp_path: Path, random_model: str) -> None:
    flags = [*NCCL, *NO_REFERENCE, "--train.async_enable", "--perturbation", "gumbel"]
    steps, _ = run(tmp_path, random_model, *flags, by="update_weight")
    assert_exact(steps)
