# SPDX-License-Identifier: Apache-2.0
"""Policy noise: the scales by hand, noise that comes off to the bit, and how trainer and engines are told of it."""

import dataclasses
import math
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ngrpo.config import parse, rules
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods import policy_noises
from ngrpo.trainers.openrlhf.actor_trainer import actor_trainer
from ngrpo.trainers.openrlhf.experience_maker import rollout_policy_measures
from ngrpo.trainers.openrlhf.model_actors import policy_model_actor
from ngrpo.trainers.openrlhf.trainer import steps_of_run, trainer
from perturbations.errors import UsageError
from tests.support.gradient_problem import policy_loss
from tests.support.openrlhf_doubles import LOGGED, makers_state
from tests.support.run import run_with

# --- scales -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "step", "expected"),
    [
        ("released", 59, 0.0),
        ("released", 60, 1e-2),
        # 1e-2 · .01^(4/8).
        ("released", 300, 1e-3),
        ("released", 600, 1e-4),
        ("paper", 59, 0.0),
        ("paper", 60, 1e-2),
        # 1e-2 · .01^(8/9).
        ("paper", 599, 1.6681e-4),
    ],
)
def test_aqn_over_600_steps(form: str, step: int, expected: float) -> None:
    """Of the run, or of the option ``steps``; the last scale and the divergence do not matter."""
    aqn = policy_noises.create("aqn", start=1e-2, end=1e-4, form=form)
    assert aqn.scale(step, 600, None, None) == pytest.approx(expected, rel=1e-4)
    with_own_steps = dataclasses.replace(aqn, steps=600)
    assert with_own_steps.scale(step, 9999, 0.3, 0.1) == pytest.approx(expected, rel=1e-4)


def test_psn_is_constant_by_default() -> None:
    assert policy_noises.create("psn").scale(5, 9, 0.004, 0.005) == 0.001


@pytest.mark.parametrize(
    ("last_scale", "divergence", "expected"),
    [
        # Below .003, so .004 · 1.01.
        pytest.param(0.004, 0.001, 0.00404, id="up"),
        # Above, so .004 / 1.01.
        pytest.param(0.004, 0.005, 0.00396040, id="down"),
    ],
)
def test_psn_adaptive_by_hand(last_scale: float, divergence: float, expected: float) -> None:
    psn = policy_noises.create("psn", adaptive=True)
    assert psn.scale(1, 9, last_scale, divergence) == pytest.approx(expected, abs=1e-8)


def test_psn_adaptive_starts_at_its_start_and_stays_within_bounds() -> None:
    psn = policy_noises.create("psn", adaptive=True)
    assert psn.scale(0, 9, None, None) == 0.001
    assert psn.scale(1, 9, 0.4999, 0.0) == 0.5
    assert psn.scale(1, 9, 1.001e-6, 1.0) == 1e-6


def test_psn_adaptive_needs_a_divergence() -> None:
    psn = policy_noises.create("psn", adaptive=True)
    with pytest.raises(UsageError, match="needs log-probabilities of the rollout"):
        psn.scale(1, 9, 0.004, None)


# --- noise -------------------------------------------------------------------------------------------

INPUT_NORM = "model.layers.0.input_layernorm.weight"
POST_ATTENTION_NORM = "model.layers.0.post_attention_layernorm.weight"
UP_PROJECTION = "model.layers.0.mlp.up_proj.weight"
NAMES = (
    "model.embed_tokens.weight",
    INPUT_NORM,
    POST_ATTENTION_NORM,
    UP_PROJECTION,
    "model.layers.0.self_attn.q_proj.weight",
    "model.norm.weight",
)


def model_parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    draws = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(40, 30, generator=draws).to(dtype)) for name in NAMES}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "noised"),
    [
        pytest.param("aqn", {INPUT_NORM, POST_ATTENTION_NORM}, id="aqn"),
        pytest.param("psn", {UP_PROJECTION}, id="psn"),
    ],
)
def test_noise_is_added_to_the_method_s_weights_and_comes_off_to_the_bit(
    name: str, noised: set[str], dtype: torch.dtype
) -> None:
    """Also where an error ends the context."""
    model = model_parameters(dtype)
    clean = {name: parameter.detach().clone() for name, parameter in model.items()}
    with pytest.raises(RuntimeError, match="in the middle"), policy_noises.create(name).added(model, 0.5, 3):
        changes = {name: (parameter - clean[name]).float() for name, parameter in model.items()}
        assert {name for name, change in changes.items() if change.any()} == noised
        for name in noised:
            count = changes[name].numel()
            assert changes[name].std().item() == pytest.approx(0.5, rel=4 / math.sqrt(2 * count))
            assert changes[name].mean().item() == pytest.approx(0.0, abs=4 * 0.5 / math.sqrt(count))
        raise RuntimeError("in the middle")
    for name, parameter in model.items():
        assert torch.equal(parameter, clean[name])


class Noise(NamedTuple):
    of_input_norm: Tensor
    of_post_attention_norm: Tensor


def drawn_noise(sync: int = 1, seed: int = 0) -> Noise:
    """The noise of a weight sync, whatever the state of the process's generators."""
    torch.manual_seed(torch.seed() % 1000)
    clean = model_parameters()
    noisy = model_parameters()
    with policy_noises.create("aqn", seed=seed).added(noisy, 1.0, sync):
        return Noise(
            of_input_norm=(noisy[INPUT_NORM] - clean[INPUT_NORM]).detach(),
            of_post_attention_norm=(noisy[POST_ATTENTION_NORM] - clean[POST_ATTENTION_NORM]).detach(),
        )


def test_noise_follows_from_seed_sync_and_name() -> None:
    noise = drawn_noise()
    repeated = drawn_noise()
    assert torch.equal(noise.of_input_norm, repeated.of_input_norm)
    assert torch.equal(noise.of_post_attention_norm, repeated.of_post_attention_norm)


def test_noise_of_another_sync_seed_or_name_is_independent() -> None:
    noise = drawn_noise()
    for independent in (
        drawn_noise(sync=2).of_input_norm,
        drawn_noise(seed=1).of_input_norm,
        noise.of_post_attention_norm,
    ):
        pair = torch.stack([noise.of_input_norm.flatten(), independent.flatten()])
        assert torch.corrcoef(pair)[0, 1].abs() < 0.15


# --- importance weights --------------------------------------------------------------------------------

OLD_LOG_PROBS = torch.tensor([[-1.0, -1.0]])
# log π − log π_rollout of 2.5 and 1: weights 12.1825 and e.
ROLLOUT_LOG_PROBS = [-3.5, -2.0]


def test_the_importance_weight_in_the_loss_is_cut_at_ten() -> None:
    """min(12.1825, 10) = 10 and e. Loss −A times that, at ratio 1."""
    flags = policy_noises.create("psn").flags(Flags())
    low, high = flags["--algo.advantage.is_correction_threshold"]
    loss_fn = policy_loss(
        flags["--algo.advantage.is_correction_level"],
        flags["--algo.advantage.is_correction_mode"],
        (float(low), float(high)),
    )
    advantages = torch.ones(1, 2)
    mask = torch.ones(1, 2)
    rollout_log_probs = torch.tensor([ROLLOUT_LOG_PROBS])
    results = loss_fn(OLD_LOG_PROBS, OLD_LOG_PROBS, advantages, mask, rollout_log_probs, batch_num_tokens=1.0)
    assert results[0].item() == pytest.approx(-(10.0 + math.e))
    share_of_cut_weights = results[4].item()
    assert share_of_cut_weights == pytest.approx(0.5)


class Measures(NamedTuple):
    divergence: float
    weight: float | None
    cut: float | None


def measured(
    rollout_log_probs: list[float],
    loss_type: str = "ppo",
    mode: str = "clip",
    threshold: tuple[float, float] = (0.0, 10.0),
) -> Measures:
    """The step's metrics of rollouts by another policy, with these flags of OpenRLHF's."""
    correction = SimpleNamespace(
        is_correction_level="token",
        is_correction_mode=mode,
        is_correction_gating="ratio",
        is_correction_threshold=list(threshold),
    )
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=correction),
        actor=SimpleNamespace(policy_loss_type=loss_type),
    )
    experience = SimpleNamespace(
        action_log_probs=OLD_LOG_PROBS,
        rollout_log_probs=torch.tensor([rollout_log_probs]),
        action_mask=torch.ones(1, 2),
        mm_train_inputs=None,
    )
    maker = SimpleNamespace(strategy=SimpleNamespace(args=args))
    measures = rollout_policy_measures(maker, [experience])
    return Measures(
        divergence=measures["importance/divergence"],
        weight=measures.get("importance/weight"),
        cut=measures.get("importance/cut"),
    )


def test_measures_of_clipped_weights() -> None:
    """Weights 10, which is cut, and e."""
    assert measured(ROLLOUT_LOG_PROBS) == pytest.approx((-1.75, (10.0 + math.e) / 2, 0.5))


def test_measures_of_a_loss_without_weights() -> None:
    assert measured(ROLLOUT_LOG_PROBS, loss_type="gspo") == (-1.75, None, None)


def test_measures_of_masked_weights() -> None:
    """OpenRLHF's default: a token beyond the bounds is dropped."""
    assert measured(ROLLOUT_LOG_PROBS, mode="mask") == pytest.approx((-1.75, math.e / 2, 0.5))


def test_measures_of_weights_that_are_too_small() -> None:
    """Of weights e^-1 and 1, the first is below 0.5."""
    assert measured([0.0, -1.0], mode="mask", threshold=(0.5, 5.0)) == (0.5, 0.5, 0.5)


# --- in OpenRLHF ----------------------------------------------------------------------------------------


class ActorTrainer:
    """Sends the weight of its model's only norm."""

    def __init__(self, sent: list[Any]) -> None:
        model = nn.ModuleDict({"input_layernorm": nn.LayerNorm(4)})
        self.actor = SimpleNamespace(model=SimpleNamespace(module=model))
        self.weight = model.input_layernorm.weight
        self.sent = sent

    def broadcast_to_vllm(self) -> None:
        self.sent.append(self.weight.detach().clone())


class ModelActor:
    def __init__(self, sent: list[Any]) -> None:
        self.trainer = actor_trainer(ActorTrainer)(sent)

    def broadcast_to_vllm(self) -> None:
        self.trainer.broadcast_to_vllm()

    def async_run_method(self, method_name: str, **kwargs: Any) -> None:
        getattr(self, method_name)(**kwargs)


class PlainTrainer:
    """As OpenRLHF's, of a run of four training steps; ``sent`` holds the weights and evaluations in their order."""

    tensorboard_logger = None
    kl_ctl = SimpleNamespace(value=0.01)
    args = SimpleNamespace(train=SimpleNamespace(num_episodes=1), rollout=SimpleNamespace(batch_size=2))
    prompts_dataloader = range(8)

    def __init__(self, **states: Any) -> None:
        self.sent: list[Any] = []
        self.experience_maker = makers_state()
        self.states = states
        self.actor_model_group = policy_model_actor(ModelActor)(self.sent)

    def init_checkpoint_states(self) -> dict[str, Any]:
        return self.states

    def train_step(self, samples: Any, step: int) -> tuple[dict, int]:
        self.broadcast_to_vllm()
        return {}, step + 1

    def save_logs_and_checkpoints(self, global_step: int, logs_dict: Any = None, client_states: Any = None) -> None:
        pass

    def broadcast_to_vllm(self) -> None:
        self.actor_model_group.async_run_method("broadcast_to_vllm")

    def evaluate(self, step: int) -> None:
        self.sent.append("evaluation")


def test_rollouts_are_noisy_and_evaluations_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps in all, four stages: none, then 0.3 and less."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda value: value))
    run_with(monkeypatch, policy_noise=policy_noises.create("aqn", stages=4, start=0.3, end=0.1).spec())
    states = {"global_step": 1, "data_loader_state_dict": {}}
    uninterrupted = trainer(PlainTrainer)(global_step=0)
    uninterrupted.init_checkpoint_states()
    uninterrupted.train_step([], 0)
    uninterrupted.save_logs_and_checkpoints(1, LOGGED, states)
    uninterrupted.evaluate(1)
    status, _ = uninterrupted.train_step([], 1)
    assert status == {"policy_noise/scale": 0.3}, "that of the rollouts of the second step"

    stage_0, first_noisy, for_evaluation, evaluation, after_evaluation, second_noisy = uninterrupted.sent
    clean = torch.ones(4)
    assert torch.equal(stage_0, clean)
    assert not torch.equal(first_noisy, clean)
    assert torch.equal(for_evaluation, clean)
    assert evaluation == "evaluation"
    assert torch.equal(after_evaluation, first_noisy)
    assert not torch.equal(second_noisy, first_noisy)
    assert torch.equal(uninterrupted.actor_model_group.trainer.weight, clean)

    # Resumed after the first step, the engines get what they had.
    resumed = trainer(PlainTrainer)(**states)
    resumed.init_checkpoint_states()
    resumed.broadcast_to_vllm()
    resumed.train_step([], 1)
    resumed_first, resumed_second = resumed.sent
    assert torch.equal(resumed_first, first_noisy)
    assert torch.equal(resumed_second, second_noisy)


# --- the command line ------------------------------------------------------------------------------------


def completed_flags(*words: str) -> Flags:
    """The flags of a run with parameter noise."""
    model = ["--model", "m", "--task", "arithmetic", "--rollout.n_samples_per_prompt", "4"]
    command = [*model, "--policy_noise", "psn", *words]
    return rules.checked(parse.run_config(command)).flags


def test_grpo_has_weights_of_tokens() -> None:
    assert completed_flags("--preset", "grpo").value("--algo.advantage.is_correction_level") == "token"


@pytest.mark.parametrize("words", ["--preset gspo", "--actor.policy_loss_type gspo"])
def test_gspo_has_no_weights_of_tokens(words: str) -> None:
    """Its narrow clip would leave out whatever the rollout's noise moved, in the direction of negative advantages."""
    with pytest.raises(UsageError, match=r"policy_loss_type gspo with .* cannot be used with --policy_noise psn"):
        completed_flags(*words.split())
    flags = completed_flags(*words.split(), "--algo.advantage.is_correction_level", "off")
    assert flags.has("--actor.policy_loss_type")


@pytest.mark.parametrize(
    ("prompts", "drawn_at_once", "steps"),
    [
        # Three steps in each of four episodes.
        (10, None, 12),
        (8, None, 8),
        (1, None, 4),
        (8, 8, 8),
        (8, 2, 16),
    ],
)
def test_steps_of_a_run_count_the_smaller_batches(prompts: int, drawn_at_once: int | None, steps: int) -> None:
    """Batches of four prompts, four episodes; a step has no more prompts than engines draw at once."""
    rollout = SimpleNamespace(batch_size=4, vllm_generate_batch_size=drawn_at_once)
    args = SimpleNamespace(train=SimpleNamespace(num_episodes=4), rollout=rollout)
    assert steps_of_run(args, prompts) == steps
