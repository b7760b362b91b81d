# SPDX-License-Identifier: Apache-2.0
"""The trainer for TRL without an engine: its arguments, and what a forward is given."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor

pytest.importorskip("trl", reason="needs TRL: pip install --no-deps trl==1.16.0")
from trl import GRPOConfig
from trl.generation import vllm_generation

from ngrpo.rollout import records, settings
from ngrpo.rollout.check_texts import record_of
from ngrpo.trainers import trl as trl_trainer
from ngrpo.trainers.trl import PerturbedGRPOTrainer
from perturbations import FinishedTrajectory, UsageError, create


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., dict[str, Any]]]:
    """Makes trainers without a model, and returns the arguments that their engines would get."""
    folder = tmp_path_factory.mktemp("run")
    patch = pytest.MonkeyPatch()
    engines: list[dict[str, Any]] = []
    patch.setattr(vllm_generation, "LLM", lambda **options: engines.append(options))

    @wraps(trl_trainer.GRPOTrainer.__init__)  # keeps the signature
    def trl_s_own(self: Any, *args: Any, **kwargs: Any) -> None:
        vllm_generation.LLM(model="m", max_num_batched_tokens=4096, logprobs_mode="processed_logprobs")
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: torch.nn.Linear(1, 1))
        self.model = None

    patch.setattr(trl_trainer.GRPOTrainer, "__init__", trl_s_own)

    def make(
        *args: Any, seed: int = 3, process: int = 0, more: dict[str, Any] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        of_test = {"use_vllm": True, "use_cpu": True, "bf16": False, "report_to": []}
        config = GRPOConfig(output_dir=str(folder), seed=seed, **of_test, **(more or {}))
        patch.setattr(GRPOConfig, "process_index", process)
        PerturbedGRPOTrainer("m", None, config, *args, **{"perturbation": {"name": "neighbor"}, **kwargs})
        return engines[-1]

    yield make
    patch.undo()


def test_the_engine_s_options_replace_trl_s(trainers: Callable[..., dict[str, Any]]) -> None:
    more = {"perturbation_replay_buffer": {"name": "memory"}}
    options = trainers(vllm_options={"max_num_batched_tokens": 512, "additional_config": more})
    assert options["max_num_batched_tokens"] == 512
    assert options["logprobs_mode"] == "processed_logprobs"
    assert options["additional_config"]["perturbation_replay_buffer"] == {"name": "memory"}
    assert options["additional_config"]["perturbation"]["name"] == "neighbor"


def test_the_engine_hands_over_records_without_a_perturbation_too(trainers: Callable[..., dict[str, Any]]) -> None:
    options = trainers(perturbation={"name": "none"})
    assert settings.read(options["additional_config"]) is not None


@pytest.mark.parametrize("perturbation", ["neighbor", None, {"rate": 0.1}])
def test_a_perturbation_without_a_name_is_refused(perturbation: Any, trainers: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(UsageError, match="must be a dictionary with a 'name'"):
        trainers(perturbation=perturbation)


@pytest.mark.parametrize("key", ["perturbation", "sampling_masks", "sampling_schedule"])
def test_an_entry_of_the_additional_config_that_would_be_lost_is_refused(
    key: str, trainers: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(UsageError, match=rf"additional_config'\]\['{key}'\]"):
        trainers(vllm_options={"additional_config": {key: {"name": "ead"}}})


def test_each_process_and_each_seed_of_the_run_has_its_own_draws(trainers: Callable[..., dict[str, Any]]) -> None:
    """TRL spreads the responses to one prompt over its processes, whose engines all number them from 1 on."""
    made = [trainers(seed=seed, process=process) for seed in (3, 4) for process in (0, 1)]
    assert len({options["additional_config"]["perturbation"]["seed"] for options in made}) == 4
    assert trainers(seed=3, process=1) == made[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 2),
        ("logprobs_mode", "raw_logprobs"),
        ("enable_sleep_mode", True),
        ("seed", 1),
        ("model", "other"),
    ],
)
def test_an_option_that_trl_relies_on_is_refused(
    name: str, value: Any, trainers: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(UsageError, match=rf"^vllm_options\['{name}'\]=.*: leave it out"):
        trainers(vllm_options={name: value})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"generation_kwargs": {"seed": 7}}, "generation_kwargs with seed=7 cannot be used with"),
        ({"generation_kwargs": {"n": 4}}, "generation_kwargs with n=4"),
        ({"generation_kwargs": {"logprobs": 5}}, "generation_kwargs with logprobs=5"),
        ({"generation_kwargs": {"extra_args": {"perturbation": {"seed": 1}}}}, "generation_kwargs with extra_args="),
        ({"model_init_kwargs": {"use_kernels": True}}, r"model_init_kwargs\['use_kernels'\] cannot be used with"),
    ],
)
def test_settings_of_trl_that_spoil_records_are_refused(
    more: dict[str, Any], message: str, trainers: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(UsageError, match=message):
        trainers(more=more)


def test_pictures_are_refused(trainers: Callable[..., dict[str, Any]]) -> None:
    """vLLM expands a picture's place again that TRL has expanded, so records would be of other positions."""
    trainers(train_dataset=Dataset.from_dict({"prompt": ["a"]}))
    for column in ("image", "images"):
        pictures = Dataset.from_dict({"prompt": ["a"], column: [None]})
        with pytest.raises(UsageError, match="train_dataset with pictures"):
            trainers(train_dataset=pictures)
        with pytest.raises(UsageError, match="eval_dataset with pictures"):
            trainers(eval_dataset={"sums": pictures})


def test_another_release_of_trl_is_refused(
    trainers: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl_trainer, "installed", lambda package: "1.14.0")
    with pytest.raises(UsageError, match=r"TRL 1\.14\.0 is installed; supported: 1\.16"):
        trainers()


def test_a_tool_without_its_name_is_refused(trainers: Callable[..., dict[str, Any]]) -> None:
    """``tools`` is the twelfth argument of TRL's trainer."""
    with pytest.raises(UsageError, match="tools cannot be used with"):
        trainers(None, None, None, None, None, (None, None), None, None, [print])


class _Rollout:
    """What a forward uses of a rollout, recognised by its number."""

    def __init__(self, number: int) -> None:
        self.record = number


def _bare(**attributes: Any) -> Any:
    """A trainer of which TRL has set up nothing."""
    trainer = object.__new__(PerturbedGRPOTrainer)
    defaults = {
        "_perturbation": create("neighbor"),
        "_replay_routing": False,
        "_correct_mask": False,
        "_rows_of_forward": None,
        "_rollouts": {True: [_Rollout(number) for number in range(6)], False: []},
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(is_main_process=True, unwrap_model=lambda model: model, autocast=nullcontext),
        "args": SimpleNamespace(report_to=[]),
        "state": SimpleNamespace(global_step=0),
        "_on_policy_batch": None,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "perturbation_gap": math.nan,
    }
    vars(trainer).update(defaults | attributes)
    return trainer


@pytest.mark.parametrize("rows", [None, [5, 0, 2, 1]])
def test_each_part_of_a_batch_has_its_records_and_its_pictures(
    rows: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL splits a batch of four, one picture each, into parts of two and two."""
    replayed: list[int] = []
    seen: list[tuple[list[int], list[float], list[int]]] = []

    def replaying(_model: Any, recorded: list[int], _mask: Tensor, _perturbation: Any) -> Any:
        replayed[:] = recorded
        return nullcontext()

    def model(input_ids: Tensor, pixel_values: Tensor, token_type_ids: Tensor, **_: Any) -> Any:
        seen.append((list(replayed), pixel_values.flatten().tolist(), token_type_ids[:, 0].tolist()))
        return SimpleNamespace(log_probs=torch.zeros(input_ids.shape))

    monkeypatch.setattr(trl_trainer, "replaying", replaying)
    trainer = _bare(_rows_of_forward=rows)
    log_probs, _, _ = trainer._get_per_token_logps_and_entropies(
        model,
        torch.ones(4, 5, dtype=torch.int64),
        torch.ones(4, 5, dtype=torch.int64),
        2,
        batch_size=2,
        pixel_values=torch.arange(4.0).view(4, 1),
        num_images=[1, 1, 1, 1],
        token_type_ids=torch.arange(4).view(4, 1).expand(4, 5),
    )
    numbers = rows or [0, 1, 2, 3]
    assert log_probs.shape == (4, 2)
    assert seen == [(numbers[:2], [0.0, 1.0], [0, 1]), (numbers[2:], [2.0, 3.0], [2, 3])]


@pytest.mark.parametrize(
    ("evaluates", "option", "enabled", "round_"),
    [(True, True, True, 15), (True, False, False, 15), (False, False, True, 14)],
)
def test_evaluation_is_perturbed_where_the_perturbation_says_so(
    evaluates: bool, option: bool, enabled: bool, round_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training and evaluation of a step are rounds of their own. The user's dictionary stays as it is."""
    of_user = {"extra_args": {"other": 1}}
    generation = SimpleNamespace(generation_kwargs=of_user, llm=None)
    trainer = _bare(
        _perturbation=create("neighbor", perturb_eval=option),
        model=SimpleNamespace(training=not evaluates),
        state=SimpleNamespace(global_step=7),
        vllm_generation=generation,
    )
    requested: list[Any] = []

    def generate(*_args: Any) -> Any:
        requested.append(generation.generation_kwargs["extra_args"])
        return [], []

    monkeypatch.setattr(trl_trainer.GRPOTrainer, "_generate_single_turn", generate)
    monkeypatch.setattr(records, "take_finished", lambda llm: {})
    trainer._generate_single_turn([])
    assert requested == [{"other": 1, "perturbation": {"enabled": enabled, "round": round_}}]
    assert generation.generation_kwargs is of_user
    assert of_user == {"extra_args": {"other": 1}}


@pytest.mark.parametrize(
    ("prompt", "completion", "message"),
    [
        (3, 2, None),
        (7, 2, r"has 7 \+ 2 tokens of prompt and response, its record has 3 \+ 2"),  # of a picture, for example
        (3, 4, r"has 3 \+ 4 tokens of prompt and response, its record has 3 \+ 2"),
    ],
)
def test_a_record_of_other_tokens_is_an_error(
    prompt: int, completion: int, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_of({3: 5}, prompt_tokens=3, num_tokens=5)
    rollout = FinishedTrajectory(record=record, log_probs=np.zeros(5, np.float32))
    trainer = _bare(vllm_generation=SimpleNamespace(generation_kwargs={}, llm=None))
    monkeypatch.setattr(
        trl_trainer.GRPOTrainer, "_generate_single_turn", lambda *args: ([[1] * completion], [[0.0] * completion])
    )
    taken = [{}, {"0": rollout}]
    monkeypatch.setattr(records, "take_finished", lambda llm: taken.pop(0))
    if message is None:
        trainer._generate_single_turn([[1] * prompt])
        return
    with pytest.raises(RuntimeError, match=message):
        trainer._generate_single_turn([[1] * prompt])


# ---- the mismatch --------------------------------------------------------------------------------------------------


def batch_with_gap(gap: float, trained: int = 1) -> dict[str, Tensor]:
    """A response of two tokens whose first one has this mismatch with log-probabilities of −1."""
    return {
        "sampling_per_token_logps": torch.tensor([[-1.0 - gap, math.nan]]),
        "completion_mask": torch.tensor([[trained, trained]]),
    }


@pytest.mark.parametrize(
    ("own", "trained", "of_others", "logged"),
    [(0.5, 1, 9.0, [9.0]), (0.5, 1, 0.25, [0.5]), (0.5, 0, 0.25, [0.25]), (0.5, 0, -math.inf, [])],
)
def test_the_mismatch_is_that_of_all_processes(own: float, trained: int, of_others: float, logged: list[float]) -> None:
    """A process whose responses were all cut off has none, and still takes part."""
    trainer = _bare()
    trainer.accelerator.gather = lambda largest: torch.stack([largest, torch.tensor(of_others)])
    trainer._note_gap(torch.tensor([[-1.0, -1.0]]), batch_with_gap(own, trained))
    assert trainer._metrics["train"]["perturbation/gap_max"] == logged


@pytest.mark.parametrize("has_old", [True, False])
def test_without_old_log_probabilities_the_loss_s_own_are_compared(
    has_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``vllm_importance_sampling_correction=False``: TRL computes no old log-probabilities for aligned steps."""
    monkeypatch.setattr(trl_trainer, "replaying", lambda *args: nullcontext())
    monkeypatch.setattr(
        trl_trainer.GRPOTrainer,
        "_get_per_token_logps_and_entropies",
        lambda self, *args, **kwargs: (torch.tensor([[-1.0, -1.0]]), None, None),
    )
    monkeypatch.setattr(
        trl_trainer.GRPOTrainer,
        "_compute_loss",
        lambda self, model, inputs: self._get_per_token_logps_and_entropies(model, torch.ones(1, 3), None, 2)[0].sum(),
    )
    trainer = _bare()
    trainer.accelerator.gather = lambda largest: largest
    inputs = {**batch_with_gap(0.5), trl_trainer._ROWS: torch.tensor([0])}
    if has_old:
        inputs["old_per_token_logps"] = torch.zeros(1, 2)
    trainer._compute_loss(None, inputs)
    assert trainer._metrics["train"]["perturbation/gap_max"] == ([] if has_old else [0.5])
    assert math.isnan(trainer.perturbation_gap) == has_old
