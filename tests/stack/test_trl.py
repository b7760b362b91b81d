# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer with perturbed rollouts in float32: two real steps, exact replay. Slow: `make test-all`."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs TRL: pip install --no-deps trl==1.16.0")
pytestmark = pytest.mark.slow

SPEC = {"name": "neighbor", "rate": 0.5, "mix_temperature": 3.0}
ENGINE = {"enforce_eager": True, "dtype": "float32", "kv_cache_memory_bytes": 1 << 28}


def trainer(folder: Path, model: str, config: dict[str, Any] | None = None, **given: Any) -> Any:
    """A trainer of two steps; ``config`` is of TRL's configuration, ``given`` of the trainer."""
    from datasets import Dataset
    from trl import GRPOConfig

    from ngrpo.trainers.trl import PerturbedGRPOTrainer

    options = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 128, "use_cpu": True, "bf16": False}
    options |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "steps_per_generation": 2}
    options |= {"gradient_accumulation_steps": 2, "num_generations": 4, "max_completion_length": 12, "max_steps": 2}
    options |= {"learning_rate": 1e-4, "lr_scheduler_type": "constant", "beta": 0.01, "seed": 3}
    quiet = {"logging_steps": 1, "report_to": [], "save_strategy": "no"}
    options |= config or {}
    args = GRPOConfig(output_dir=str(folder), model_init_kwargs={"dtype": "float32"}, **options, **quiet)
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"What is {n} + 7?"}]} for n in range(2, 10)])

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(str(answer)) % 3) for answer in completions]

    settings = {"perturbation": SPEC, "vllm_options": ENGINE, **given}
    return PerturbedGRPOTrainer(model, reward, args=args, train_dataset=rows, eval_dataset=rows, **settings)


@pytest.mark.parametrize("perturbation", [SPEC, {"name": "none"}], ids=["neighbor", "none"])
def test_log_probabilities_among_the_tokens_that_sampling_left(
    perturbation: dict[str, Any], tmp_path: Path, smollm2: str
) -> None:
    """Rollouts of top-k 20 and top-p 0.9 at temperature 1.2: old log-probabilities agree with vLLM's to 1e-4, under the
    first weights and after an update, and TRL weighs each token by 1."""
    filters = {"top_k": 20, "top_p": 0.9, "temperature": 1.2}
    made = trainer(tmp_path, smollm2, filters, perturbation=perturbation, correct_mask=True)
    made.train()
    logged = [entry for entry in made.state.log_history if "perturbation/gap_max" in entry]
    assert len(logged) == 2 and all(entry["perturbation/gap_max"] <= 1e-4 for entry in logged), logged
    assert all(entry["kl"] >= 0.0 and entry["grad_norm"] > 0.0 for entry in logged)
    left = [len(tokens) for rollout in made._rollouts[True] for tokens in rollout.sampling_mask.left()]
    assert left and max(left) <= 20, "without the correction the gap is that of the tokens that were cut"
    made._correct_mask = False
    made.model.train()
    made._generate_and_score_completions([made.train_dataset[row // 4] for row in range(8)])
    assert made.perturbation_gap > 1e-2


def test_two_steps_and_an_evaluation(tmp_path: Path, smollm2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gap is of eight rollouts before the first step, and of eight under the weights after it."""
    from ngrpo.trainers import trl as ours

    made = trainer(tmp_path, smollm2)
    made.train()
    logged = [each for each in made.state.log_history if "perturbation/gap_max" in each]
    assert len(logged) == 2 and all(each["perturbation/gap_max"] <= 1e-4 for each in logged), logged
    assert all(each["kl"] >= 0.0 and each["grad_norm"] > 0.0 for each in logged)
    records = [rollout.record for rollout in made._rollouts[True]]
    assert len(records) == 8 and sum(map(len, records)) / sum(r.num_tokens - r.prompt_tokens for r in records) > 0.2
    made.evaluate()
    assert made.perturbation_gap <= 1e-4 and all(len(each.record) == 0 for each in made._rollouts[False])
    # The test could not fail if nothing were replayed.
    monkeypatch.setattr(ours, "replaying", lambda *args, **kwargs: contextlib.nullcontext())
    made.model.train()
    made._generate_and_score_completions([made.train_dataset[i // 4] for i in range(8)])
    assert made.perturbation_gap > 1e-2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"perturbation": {"name": "neighbour"}}, "neighbor"),
        ({"perturbation": {"name": "gumbel", "density": "gumbel"}}, "density"),
        ({"perturbation": {"name": "hrpo"}}, "send its parameters"),
        ({"tools": [print]}, "tools"),
        ({"rollout_func": print}, "rollout_func"),
    ],
)
def test_what_is_not_replayed_is_refused(tmp_path: Path, smollm2: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trainer(tmp_path, smollm2, **given)
