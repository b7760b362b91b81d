# SPDX-License-Identifier: Apache-2.0
"""Policy noise: the scales by hand, noise that comes off to the bit, and how trainer and engines are told of it."""

import dataclasses
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

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

NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.post_attention_layernorm.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.norm.weight",
)


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    drawn = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(40, 30, generator=drawn).to(dtype)) for name in NAMES}


# --- scales -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "step", "expected"),
    [
        ("released", 59, 0.0),
        ("released", 60, 1e-2),
        ("released", 300, 1e-3),  # 1e-2 · .01^(4/8)
        ("released", 600, 1e-4),
        ("paper", 59, 0.0),
        ("paper", 60, 1e-2),
        ("paper", 599, 1.6681e-4),  # 1e-2 · .01^(8/9)
    ],
)
def test_aqn_over_600_steps(form: str, step: int, expected: float) -> None:
    noise = policy_noises.create("aqn", start=1e-2, end=1e-4, form=form)
    own_steps = dataclasses.replace(noise, steps=600)
    assert noise.scale(step, 600, None, None) == pytest.approx(expected, rel=1e-4)
    assert own_steps.scale(step, 9999, 0.3, 0.1) == pytest.approx(expected, rel=1e-4)


def test_psn_adaptive() -> None:
    """σ = .004: a divergence of .001 is below .003, so .004 · 1.01; .005 is above, so .004 / 1.01."""
    noise = policy_noises.create("psn", adaptive=True)
    assert noise.scale(0, 9, None, None) == 0.001
    assert noise.scale(1, 9, 0.004, 0.001) == pytest.approx(0.00404)
    assert noise.scale(1, 9, 0.004, 0.005) == pytest.approx(0.00396040, abs=1e-8)
    assert noise.scale(1, 9, 0.4999, 0.0) == 0.5 and noise.scale(1, 9, 1.001e-6, 1.0) == 1e-6
    assert policy_noises.create("psn").scale(5, 9, 0.004, 0.005) == 0.001
    with pytest.raises(UsageError, match="needs log-probabilities of the rollout"):
        noise.scale(1, 9, 0.004, None)


# --- noise -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "noised"), [("aqn", NAMES[1:3]), ("psn", NAMES[3:4])])
def test_noise_is_added_to_the_method_s_weights_and_comes_off_to_the_bit(
    name: str, noised: tuple[str, ...], dtype: torch.dtype
) -> None:
    noise, model = policy_noises.create(name), parameters(dtype)
    before = {name: p.detach().clone() for name, p in model.items()}
    with pytest.raises(RuntimeError, match="in the middle"), noise.added(model, 0.5, 3):
        for name, parameter in model.items():
            moved = (parameter - before[name]).float()
            if name not in noised:
                assert torch.equal(parameter, before[name])
                continue
            assert moved.std().item() == pytest.approx(0.5, rel=4 / math.sqrt(2 * moved.numel()))
            assert moved.mean().item() == pytest.approx(0.0, abs=4 * 0.5 / math.sqrt(moved.numel()))
        raise RuntimeError("in the middle")
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.items())


def test_noise_follows_from_seed_sync_and_name() -> None:
    def drawn(sync: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        model = parameters()
        torch.manual_seed(torch.seed() % 1000)  # whatever stands in the process
        with policy_noises.create("aqn", seed=seed).added(model, 1.0, sync):
            first, second = (model[name].detach().clone() for name in NAMES[1:3])
        return first - model[NAMES[1]].detach(), second - model[NAMES[2]].detach()

    one, again = drawn(), drawn()
    assert all(map(torch.equal, one, again))
    for other in (drawn(sync=2)[0], drawn(seed=1)[0], one[1]):
        assert torch.corrcoef(torch.stack([one[0].flatten(), other.flatten()]))[0, 1].abs() < 0.15


# --- importance weights --------------------------------------------------------------------------------


def test_the_importance_weight_is_cut_at_ten() -> None:
    """log π − log π_rollout of 2.5 and 1: min(12.1825, 10) = 10 and e. Loss −A times that, at ratio 1."""
    noise = policy_noises.create("psn").flags(Flags())
    level, mode = noise["--algo.advantage.is_correction_level"], noise["--algo.advantage.is_correction_mode"]
    low, high = (float(bound) for bound in noise["--algo.advantage.is_correction_threshold"])
    loss, old = policy_loss(level, mode, (low, high)), torch.tensor([[-1.0, -1.0]])
    found = loss(old, old, torch.ones(1, 2), torch.ones(1, 2), torch.tensor([[-3.5, -2.0]]), batch_num_tokens=1.0)
    assert found[0].item() == pytest.approx(-(10.0 + math.e)) and found[4].item() == pytest.approx(0.5)
    correction = SimpleNamespace(is_correction_level=level, is_correction_mode=mode, is_correction_gating="ratio")
    correction.is_correction_threshold = [low, high]
    args = SimpleNamespace(algo=SimpleNamespace(advantage=correction), actor=SimpleNamespace(policy_loss_type="ppo"))
    made = SimpleNamespace(strategy=SimpleNamespace(args=args))

    def measured(*log_probs: float) -> tuple[float | None, ...]:
        rollout = torch.tensor([log_probs])
        experience = SimpleNamespace(action_log_probs=old, rollout_log_probs=rollout, action_mask=torch.ones(1, 2))
        found = rollout_policy_measures(made, [experience])
        return tuple(found.get(f"importance/{name}") for name in ("divergence", "weight", "cut"))

    assert measured(-3.5, -2.0) == pytest.approx((-1.75, (10.0 + math.e) / 2, 0.5))
    args.actor.policy_loss_type = "gspo"  # whose loss is not weighed by it
    assert measured(-3.5, -2.0) == (-1.75, None, None)
    args.actor.policy_loss_type = "ppo"
    correction.is_correction_mode = "mask"  # OpenRLHF's default: a token beyond the bounds is dropped
    assert measured(-3.5, -2.0) == pytest.approx((-1.75, math.e / 2, 0.5))
    correction.is_correction_threshold = [0.5, 5.0]
    assert measured(0.0, -1.0) == (0.5, 0.5, 0.5), "of weights e^-1 and 1, the first is too small"


# --- in OpenRLHF ----------------------------------------------------------------------------------------


class ActorTrainer:
    """Sends the weight of its model's only norm."""

    def __init__(self, sent: list[Any]) -> None:
        self.actor = SimpleNamespace(model=SimpleNamespace(module=nn.ModuleDict({"input_layernorm": nn.LayerNorm(4)})))
        self.weight, self.sent = self.actor.model.module.input_layernorm.weight, sent

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
    """As OpenRLHF's, of a run of four training steps."""

    tensorboard_logger = None
    args = SimpleNamespace(train=SimpleNamespace(num_episodes=1), rollout=SimpleNamespace(batch_size=2))
    prompts_dataloader = range(8)

    def __init__(self, **states: Any) -> None:
        self.sent, self.experience_maker, self.states = [], makers_state(), states
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
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda value: value))
    # Four steps in all, four stages: none, then 0.3 and less.
    run_with(monkeypatch, policy_noise=policy_noises.create("aqn", stages=4, start=0.3, end=0.1).spec())
    whole, states = trainer(PlainTrainer)(global_step=0), {"global_step": 1, "data_loader_state_dict": {}}
    whole.init_checkpoint_states()
    whole.train_step([], 0)
    whole.save_logs_and_checkpoints(1, LOGGED, states)
    whole.evaluate(1)
    status, _ = whole.train_step([], 1)
    clean, first, again, evaluation, back, second = whole.sent
    assert evaluation == "evaluation"
    ones = torch.ones(4)
    assert torch.equal(clean, ones) and torch.equal(again, ones), "stage 0, and the evaluation"
    assert not torch.equal(first, ones) and not torch.equal(second, first)
    assert torch.equal(first, back)
    assert torch.equal(whole.actor_model_group.trainer.weight, ones)
    assert status == {"policy_noise/scale": 0.3}, "that of the rollouts of the second step"
    # Resumed after the first step, the engines get what they had.
    resumed = trainer(PlainTrainer)(**states)
    resumed.init_checkpoint_states()
    resumed.broadcast_to_vllm()
    resumed.train_step([], 1)
    assert len(resumed.sent) == 2 and torch.equal(resumed.sent[0], first) and torch.equal(resumed.sent[1], second)


# --- the command line ------------------------------------------------------------------------------------


def test_gspo_has_no_weights_of_tokens() -> None:
    """Its narrow clip would leave out whatever the rollout's noise moved, in the direction of negative advantages."""

    def complete(*words: str) -> Flags:
        line = ["--model", "m", "--task", "arithmetic", "--rollout.n_samples_per_prompt", "4", "--policy_noise", "psn"]
        return rules.checked(parse.run_config([*line, *words])).flags

    assert complete("--preset", "grpo").value("--algo.advantage.is_correction_level") == "token"
    for words in (["--preset", "gspo"], ["--actor.policy_loss_type", "gspo"]):
        with pytest.raises(UsageError, match=r"policy_loss_type gspo with .* cannot be used with --policy_noise psn"):
            complete(*words)
        assert complete(*words, "--algo.advantage.is_correction_level", "off").has("--actor.policy_loss_type")


def test_steps_of_a_run_count_the_smaller_batches() -> None:
    """Ten prompts in batches of four are three steps in each of four episodes."""
    args = SimpleNamespace(train=SimpleNamespace(num_episodes=4), rollout=SimpleNamespace(batch_size=4))
    assert [steps_of_run(args, prompts) for prompts in (10, 8, 1)] == [12, 8, 4]
