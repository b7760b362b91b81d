# SPDX-License-Identifier: Apache-2.0
"""What a perturbed run may be combined with: each trains for real, and its replay is exact. Slow: `make test-all`.

Variants that do not hide each other share a run. In every run the gap between the log-probabilities of rollout and
trainer is judged, by the test and by the run itself (`--perturbation.strict`). The first test has a wrong replay, which
a strict run must notice.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.pipeline.harness import GAP, LOUD, assert_nothing_runs, steps_of, summary_of, train
from tests.support.tiny_folder import tiny_folder

pytestmark = pytest.mark.slow

USER_FILES = Path(__file__).with_name("user_files")
EMBEDDING = "model.embed_tokens.weight"
# Half of the inputs are far from the token's own: without the replay the gap is many times that of rounding.
NEIGHBOR = ["--perturbation", "neighbor", "--perturbation.rate", "0.5", "--perturbation.mix_temperature", "3"]
# A replay that is wrong widens the gap at plain positions too, since they see the wrong inputs before them: both are
# held to GAP.
STRICT = ["--perturbation.strict", "--perturbation.gap_limit", "2.5"]
NO_REFERENCE = ["--algo.kl.init_coef", "0"]
# Batches of four samples, so that two ranks have one each and one rank several.
SMALL_BATCHES = ["--rollout.micro_batch_size", "4", "--train.micro_batch_size", "4"]


def run(folder: Path, model: str, *flags: str, ratio: float = 1e-3) -> dict[str, Any]:
    """The summary of a run of at least two steps whose replay was exact in each."""
    summary = summary_of(folder, model, *STRICT, *flags)
    assert_nothing_runs(folder)
    assert len(summary["steps"]) >= 2, "a weight sync lies between the rollouts"
    for step in summary["steps"]:
        perturbed = step["gap_perturbed_mean"]
        plain = step["gap_plain_mean"]
        print(f"step {step['step']:.0f}: gap {perturbed:.1e} after perturbed inputs, {plain:.1e} at plain positions")
        assert 0.2 < step["rate"] <= step["planned_rate"]
        assert step["shift"] > 0.0
        assert perturbed <= GAP
        assert plain <= GAP
    # The ratio is 1 if the forward of the old log-probabilities and that of training replay alike.
    assert summary["steps"][0]["ratio_mean"] == pytest.approx(1.0, abs=ratio)
    return summary


def embedding_of(folder: str) -> torch.Tensor:
    return load_file(Path(folder) / "model.safetensors")[EMBEDDING].float()


def moved(summary: dict[str, Any], model: str) -> float:
    """How far the saved model is from the one that the training began with, summed over the embedding."""
    saved = embedding_of(summary["places"]["checkpoint"])
    return float((saved - embedding_of(model)).abs().sum())


def test_a_replay_that_is_wrong_is_noticed(tmp_path: Path, smollm2: str) -> None:
    buffer = ["--perturbation.replay_buffer", f"{USER_FILES / 'mixed_up.py'}:MixedUp"]
    result = train(tmp_path, smollm2, *LOUD, *NEIGHBOR, *NO_REFERENCE, "--perturbation.strict", *buffer)
    assert result.returncode == 1
    end = result.stdout[-4000:]
    assert "training failed" in end
    assert "log-probabilities of rollout and trainer differ" in end


def test_a_model_of_the_transformers_backend(tmp_path: Path, smollm2: str) -> None:
    """vLLM has no class of its own for SmolLM3: its ids come in the shape (1, N).

    A strict run checks the engine before the first request and after each sync; a reproducible one is paused for that.
    """
    (tmp_path / "model").mkdir()
    model = tiny_folder(
        tmp_path / "model",
        smollm2,
        "smollm3",
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    flags = ["--perturbation", "neighbor", "--perturbation.variant", "released", "--perturbation.rate", "0.5"]
    for step in steps_of(tmp_path / "run", model, *LOUD, *flags, "--perturbation.strict", "--reproducible"):
        assert step["rate"] == pytest.approx(0.5, abs=0.12)
        for positions in ("perturbed", "plain", "before"):
            assert step[f"gap_{positions}_mean"] < 0.1, positions


def test_two_ranks_of_zero_2(tmp_path: Path, smollm2: str) -> None:
    """With two epochs of two updates for each rollout, and a moving average of the weights, which is what is saved."""
    # Updates are small, so that the second epoch's ratio shows the replay and not a policy that has gone far.
    flags = [*NEIGHBOR, *NO_REFERENCE, *SMALL_BATCHES, "--actor.adam.lr", "1e-5", "--actor.lr_warmup_ratio", "0"]
    flags += ["--actor.num_gpus_per_node", "2", "--train.max_epochs", "2", "--train.batch_size", "8"]
    flags += ["--train.enable_ema", "--train.ema_beta", "0.5", "--ckpt.save_steps", "2"]
    summary = run(tmp_path, smollm2, *flags, ratio=0.1)
    states = tmp_path / "checkpoints" / "_actor" / "global_step2" / "mp_rank_00_model_states.pt"
    trained = torch.load(states, weights_only=False)["module"][EMBEDDING].float()
    trained_moved = float((trained - embedding_of(smollm2)).abs().sum())
    assert 0.0 < moved(summary, smollm2) < trained_moved


def test_two_ranks_of_zero_3(tmp_path: Path, smollm2: str) -> None:
    """With a sharded reference, reentrant gradient checkpointing, and the best checkpoint by an evaluation."""
    flags = [*LOUD, *NEIGHBOR, *SMALL_BATCHES, "--actor.num_gpus_per_node", "2", "--ref.num_gpus_per_node", "2"]
    flags += ["--algo.kl.use_loss", "--algo.kl.estimator", "k3", "--algo.kl.init_coef", "0.001"]
    flags += ["--ds.zero_stage", "3"]
    flags += ["--actor.gradient_checkpointing_enable", "--actor.gradient_checkpointing_reentrant"]
    flags += ["--eval.steps", "1", "--eval.n_samples_per_prompt", "1"]
    summary = run(tmp_path, smollm2, *flags)
    assert moved(summary, smollm2) > 0.0
    assert list((tmp_path / "checkpoints" / "_actor").glob("best_global_step*"))


def half_solved(folder: Path, problems: int) -> list[str]:
    """Flags for sums of which every second cannot be solved, and half the answers to each of the others are right."""
    rows = []
    for number in range(problems):
        label = "no answer" if number % 2 == 0 else str(number + 3)
        rows.append({"input": f"What is {number} + 3? Answer briefly.", "label": label})
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # The reward leaves its marks of the engines beside its own file, so that file is copied.
    reward = shutil.copy(USER_FILES / "half_solved.py", folder)
    return ["--data.prompt_dataset", str(file), "--data.max_samples", str(problems), "--reward.remote_url", str(reward)]


def test_two_engines_with_dynamic_filtering_and_dynamic_batches(tmp_path: Path, smollm2: str) -> None:
    """Dynamic batches are packed. Problems that are filtered away are replaced, and both engines answer."""
    flags = ["--vllm.num_engines", "2", "--preset", "dapo"]
    flags += ["--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "256", *half_solved(tmp_path, 16)]
    summary = run(tmp_path / "run", smollm2, *LOUD, *NEIGHBOR, *flags)
    assert moved(summary, smollm2) > 0.0
    assert len(list(tmp_path.glob("engine-*"))) == 2
    pass_rates = summary["scalars"]["train/dynamic_filtering_pass_rate"].values()
    assert min(pass_rates) < 400, "4 answers to each problem, and none in the batch to those that were filtered away"


def test_two_engines_of_two_tensor_parallel_ranks(tmp_path: Path, tiny: str) -> None:
    flags = [*NEIGHBOR, *NO_REFERENCE, "--vllm.num_engines", "2", "--vllm.tensor_parallel_size", "2"]
    # The model is random: only large steps make the weights of an engine that was left out visible.
    flags += ["--actor.adam.lr", "1e-2", "--actor.lr_warmup_ratio", "0"]
    summary = run(tmp_path / "run", tiny, *flags, *half_solved(tmp_path, 12))
    assert moved(summary, tiny) > 0.0
    assert len(list(tmp_path.glob("engine-*"))) == 2


def test_two_tensor_parallel_ranks_of_the_trainer(tmp_path: Path, tiny: str) -> None:
    """In bfloat16, which OpenRLHF's tensor parallelism needs: perturbed inputs are as close as unperturbed ones.

    Engines get whole matrices after each step, and the saved model has them.
    """
    flags = [*NEIGHBOR, *NO_REFERENCE, "--actor.num_gpus_per_node", "2", "--ds.tensor_parallel_size", "2"]
    # The model is random: only large steps would show an engine with other weights.
    flags += ["--ds.param_dtype", "bf16", "--actor.adam.lr", "1e-2", "--actor.lr_warmup_ratio", "0"]
    summary = summary_of(tmp_path / "run", tiny, *STRICT, *flags, *half_solved(tmp_path, 12))
    assert len(summary["steps"]) >= 2
    for step in summary["steps"]:
        assert step["rate"] > 0.2
        assert step["group_reward_std"] > 0.0
        assert step["gap_plain_mean"] <= 0.1
        assert step["gap_perturbed_mean"] <= 2.0 * step["gap_plain_mean"]
    saved = load_file(Path(summary["places"]["checkpoint"]) / "model.safetensors")
    original = load_file(Path(tiny) / "model.safetensors")
    assert {name: tensor.shape for name, tensor in saved.items()} == {
        name: tensor.shape for name, tensor in original.items()
    }
    split = "model.layers.0.self_attn.q_proj.weight"
    # Two steps of Adam, each of about the learning rate; rounding to bfloat16 alone changes less than 1e-3.
    assert (saved[split].float() - original[split].float()).abs().max() > 1e-2


@pytest.mark.parametrize("agent", ["three_turns", "rewriting"])
def test_an_agent_with_a_tool_between_its_turns_and_one_that_rewrites_them(
    agent: str, tmp_path: Path, smollm2: str
) -> None:
    """The run of the agent that rewrites is asynchronous, from three batches.

    Its engines draw the second batch during the first step, so it is a sync older than the weights that it would train,
    and is left out. The third batch is drawn after that sync.
    """
    rewrites = agent == "rewriting"
    flags = [*LOUD, *NEIGHBOR, *NO_REFERENCE, "--data.max_len", "256"]
    flags += ["--train.agent_func_path", str(USER_FILES / f"{agent}.py")]
    if rewrites:
        flags += ["--train.async_enable", "--sampling.max_staleness", "0", "--data.max_samples", "12"]
        flags += ["--eval.steps", "1"]
    summary = run(tmp_path, smollm2, *flags)

    def values_of(scalar: str) -> list[float]:
        """A scalar's values in the order of the steps."""
        return list(summary["scalars"][scalar].values())

    if rewrites:
        assert values_of("train/staleness/left_out") == [0.0, 16.0]
        assert min(values_of("train/staleness/tokens_0")) > 0.0
        assert values_of("train/staleness/tokens_1") == [0.0, 0.0]
        assert max(values_of("train/staleness/gap_0")) <= GAP
        assert set(summary["evaluation"]["eval/eval_default_pass1"]) == {"1", "2"}, "after the last step too"
    assert set(values_of("train/turns")) == {3.0}
    for step in summary["steps"]:
        assert bool(step.get("dropped_edits", 0.0)) == rewrites
