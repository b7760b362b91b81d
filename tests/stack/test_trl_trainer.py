# SPDX-License-Identifier: Apache-2.0
"""The trainer for TRL without an engine: its arguments, and what a forward is given."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="needs TRL: pip install --no-deps trl==1.16.0")
from trl import GRPOConfig
from trl.generation import vllm_generation

from ngrpo.rollout import records, settings
from ngrpo.trainers import trl as trl_trainer
from ngrpo.trainers.trl import PerturbedGRPOTrainer
from perturbations import UsageError, create


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

    def make(*args: Any, seed: int = 3, process: int = 0, **kwargs: Any) -> dict[str, Any]:
        config = GRPOConfig(output_dir=str(folder), use_vllm=True, use_cpu=True, bf16=False, seed=seed, report_to=[])
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
    ("evaluates", "option", "enabled"), [(True, True, True), (True, False, False), (False, False, True)]
)
def test_evaluation_is_perturbed_where_the_perturbation_says_so(
    evaluates: bool, option: bool, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = SimpleNamespace(generation_kwargs={"extra_args": {"other": 1}}, llm=None)
    trainer = _bare(
        _perturbation=create("neighbor", perturb_eval=option),
        model=SimpleNamespace(training=not evaluates),
        vllm_generation=generation,
    )
    monkeypatch.setattr(trl_trainer.GRPOTrainer, "_generate_single_turn", lambda *args: ([], []))
    monkeypatch.setattr(records, "take_finished", lambda llm: {})
    trainer._generate_single_turn([])
    assert generation.generation_kwargs["extra_args"] == {"other": 1, "perturbation": {"enabled": enabled}}
