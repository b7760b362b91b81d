# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer with perturbed rollouts in float32: two real steps, exact replay. Slow: `make test-all`."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from perturbations import UsageError

pytest.importorskip("trl", reason="needs TRL: pip install --no-deps trl==1.16.0")
pytestmark = pytest.mark.slow

SPEC = {"name": "neighbor", "rate": 0.5, "mix_temperature": 3.0}
ENGINE = {"enforce_eager": True, "dtype": "float32", "kv_cache_memory_bytes": 1 << 28}
CONFIG: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_max_model_length": 128,
    "use_cpu": True,
    "bf16": False,
    "model_init_kwargs": {"dtype": "float32"},
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "steps_per_generation": 2,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 12,
    "max_steps": 2,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "beta": 0.01,
    "seed": 3,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
}


def trainer(folder: Path, model: str, config: dict[str, Any] | None = None, **options: Any) -> Any:
    """A trainer of two steps; ``config`` is of TRL's configuration, ``options`` of the trainer."""
    from datasets import Dataset
    from trl import GRPOConfig

    from ngrpo.trainers.trl import PerturbedGRPOTrainer

    args = GRPOConfig(output_dir=str(folder), **{**CONFIG, **(config or {})})
    rows = []
    for number in range(2, 10):
        message = {"role": "user", "content": f"What is {number} + 7?"}
        rows.append({"prompt": [message]})
    dataset = Dataset.from_list(rows)

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(str(completion)) % 3) for completion in completions]

    settings = {"perturbation": SPEC, "vllm_options": ENGINE, **options}
    return PerturbedGRPOTrainer(model, reward, args=args, train_dataset=dataset, eval_dataset=dataset, **settings)


def logged_steps(trained: Any) -> list[dict[str, Any]]:
    """What TRL logged of each training step."""
    return [entry for entry in trained.state.log_history if "perturbation/gap_max" in entry]


def assert_both_steps_are_exact(trained: Any) -> None:
    steps = logged_steps(trained)
    assert len(steps) == 2, steps
    for step in steps:
        assert step["perturbation/gap_max"] <= 1e-4, steps
        assert step["kl"] >= 0.0
        assert step["grad_norm"] > 0.0


def roll_out(trained: Any) -> None:
    """Eight rollouts of two prompts, after which the trainer has their gap."""
    inputs = [trained.train_dataset[row // 4] for row in range(8)]
    trained._generate_and_score_completions(inputs)


@pytest.mark.parametrize("perturbation", [SPEC, {"name": "none"}], ids=["neighbor", "none"])
def test_log_probabilities_among_the_tokens_that_sampling_left(
    perturbation: dict[str, Any], tmp_path: Path, smollm2: str
) -> None:
    """Rollouts have top-k 20 and top-p 0.9 at temperature 1.2. The old log-probabilities agree with vLLM's to 1e-4,
    under the first weights and after an update, so that TRL weighs each token by 1.
    """
    filters = {"top_k": 20, "top_p": 0.9, "temperature": 1.2}
    trained = trainer(tmp_path, smollm2, filters, perturbation=perturbation, correct_mask=True)
    trained.train()
    assert_both_steps_are_exact(trained)
    left_counts = []
    for rollout in trained._rollouts[True]:
        left_counts += [len(tokens) for tokens in rollout.sampling_mask.left()]
    assert left_counts
    assert max(left_counts) <= 20

    trained._correct_mask = False
    trained.model.train()
    roll_out(trained)
    assert trained.perturbation_gap > 1e-2, "without the correction the gap is that of the tokens that were cut"


def test_two_steps_and_an_evaluation(tmp_path: Path, smollm2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gap is of eight rollouts before the first step, and of eight under the weights after it."""
    from ngrpo.trainers import trl as trl_trainer

    trained = trainer(tmp_path, smollm2)
    trained.train()
    assert_both_steps_are_exact(trained)
    records = [rollout.record for rollout in trained._rollouts[True]]
    assert len(records) == 8
    perturbed = sum(len(record) for record in records)
    generated = sum(record.num_tokens - record.prompt_tokens for record in records)
    assert perturbed / generated > 0.2

    trained.evaluate()
    assert trained.perturbation_gap <= 1e-4
    for rollout in trained._rollouts[False]:
        assert len(rollout.record) == 0, "evaluation is unperturbed"

    monkeypatch.setattr(trl_trainer, "replaying", lambda *args, **kwargs: contextlib.nullcontext())
    trained.model.train()
    roll_out(trained)
    assert trained.perturbation_gap > 1e-2, "leaving the replay out must show, or this test shows nothing"


def test_two_steps_without_a_perturbation(tmp_path: Path, smollm2: str) -> None:
    """The baseline is trained like the others: its records have nothing perturbed."""
    trained = trainer(tmp_path, smollm2, perturbation={"name": "none"})
    trained.train()
    assert_both_steps_are_exact(trained)
    assert [len(rollout.record) for rollout in trained._rollouts[True]] == [0] * 8


def test_two_steps_with_adapters(tmp_path: Path, smollm2: str) -> None:
    """TRL merges them for the engine, and its reference is the model without them."""
    from peft import LoraConfig

    adapters = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
    trained = trainer(tmp_path, smollm2, {"learning_rate": 1e-3}, peft_config=adapters)
    trained.train()
    assert_both_steps_are_exact(trained)
    assert logged_steps(trained)[1]["kl"] > 0.0


def test_adapters_of_tied_embeddings_are_refused(tmp_path: Path, smollm2: str) -> None:
    """vLLM's output layer would get the embedding's update, and the trainer's has none."""
    from peft import LoraConfig

    adapters = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(UsageError, match="its matrix is also that of lm_head"):
        trainer(tmp_path, smollm2, perturbation={"name": "none"}, peft_config=adapters)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"perturbation": {"name": "neighbour"}}, "neighbor"),
        ({"perturbation": {"name": "gumbel", "density": "gumbel"}}, "density"),
        ({"perturbation": {"name": "hrpo"}}, "send its parameters"),
        ({"tools": [print]}, "tools"),
        ({"rollout_func": print}, "rollout_func"),
    ],
)
def test_what_is_not_replayed_is_refused(tmp_path: Path, smollm2: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, smollm2, **options)
