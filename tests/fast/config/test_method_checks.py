# SPDX-License-Identifier: Apache-2.0
"""`ngrpo check` of credits, policy noises, sampling schedules and second rounds: ours pass, a broken one is refused."""

from dataclasses import dataclass
from itertools import count
from random import Random, random
from typing import Any

import pytest
import torch
from torch import Tensor

from ngrpo import cli
from ngrpo.config import kinds, parse
from ngrpo.config.kinds import KINDS
from ngrpo.config.method_checks import inspect
from ngrpo.methods.credits import Credit
from ngrpo.methods.credits.base import LossTokens, StepTokens
from ngrpo.methods.policy_noises import PolicyNoise
from ngrpo.methods.sampling_schedules import SamplingSchedule
from ngrpo.methods.sampling_schedules.base import NextTokens
from ngrpo.methods.second_rounds import SecondRound
from perturbations import option
from perturbations.errors import UsageError

OURS = [
    (kind, name)
    for kind in ("credit", "policy_noise", "sampling_schedule", "second_round")
    for name in sorted(KINDS[kind].registry.in_tree())
]


@pytest.mark.parametrize(("kind", "name"), OURS)
def test_ours_keep_the_contract(kind: str, name: str) -> None:
    assert [error for _, error in inspect(name, kind) if error is not None] == []


@dataclass(frozen=True, kw_only=True)
class Half(Credit):
    """Half of each advantage, and further losses."""

    name = "half"
    share: float = option(0.5, "what is left", low=0.0)

    def formula(self, tokens: StepTokens) -> Tensor:
        return self.share * tokens.advantages

    def in_loss(self, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        return tokens.advantages, self.share * tokens.log_probs

    def marks(self, tokens: StepTokens) -> Tensor:
        return tokens.advantages < 0.0

    def marked_loss(self, tokens: LossTokens, marked: Tensor, log_ratio: Tensor) -> Tensor:
        return self.share * log_ratio.square()


@dataclass(frozen=True, kw_only=True)
class Warm(SamplingSchedule):
    """A constant factor."""

    name = "warm"

    def factor(self, at: NextTokens) -> Tensor:
        return torch.full_like(at.temperature, 1.1)


@dataclass(frozen=True, kw_only=True)
class Everywhere(PolicyNoise):
    """Noise on every weight."""

    name = "everywhere"

    def selects(self, name: str) -> bool:
        return True

    def scale(self, step: int, steps: int, last: float | None, divergence: float | None) -> float:
        return 0.1


@dataclass(frozen=True, kw_only=True)
class Numbered(SecondRound):
    """A number in front of the prompt."""

    name = "numbered"

    @property
    def room(self) -> int:
        return 1

    def prompt(self, text: str, tokenizer: Any, random: Random) -> str:
        return f"{random.randint(0, 9)} {text}"


OWN = {"credit": Half, "sampling_schedule": Warm, "policy_noise": Everywhere, "second_round": Numbered}

CALLS = count(1)  # state between the calls of a method
BROKEN = [
    ("credit", "formula", lambda self, tokens: tokens.advantages / tokens.entropies, "formula() gives [nan]"),
    ("credit", "formula", lambda self, tokens: tokens.advantages.mean(), "has shape ()"),
    ("credit", "formula", lambda self, tokens: tokens.advantages.double(), "is torch.float64"),
    ("credit", "formula", lambda self, tokens: tokens.advantages.mul_(0.5), "changes tokens.advantages in place"),
    ("credit", "formula", lambda self, tokens: torch.rand(len(tokens.responses)), "a global random generator"),
    ("credit", "formula", lambda self, tokens: tokens.advantages * next(CALLS), "two results for the same tokens"),
    ("credit", "keeps_sums", True, "keeps_sums is True"),
    ("credit", "in_loss", lambda self, tokens: tokens.hidden, "in_loss() raises AttributeError"),
    ("credit", "in_loss", lambda self, tokens: 3.0, "in_loss() gives 3.0. It must be two tensors"),
    (
        "credit",
        "in_loss",
        lambda self, tokens: (tokens.advantages, tokens.log_probs[:2]),
        "what in_loss() returns as the term has shape (2,)",
    ),
    (
        "credit",
        "in_loss",
        lambda self, tokens: (tokens.advantages.abs() / 0.0, tokens.log_probs),
        "in_loss() gives [inf] as advantages",
    ),
    ("credit", "in_loss", lambda self, tokens: (tokens.log_probs, tokens.log_probs), "advantages with a gradient"),
    (
        "credit",
        "in_loss",
        lambda self, tokens: (tokens.advantages, tokens.log_probs * next(CALLS)),
        "in_loss() gives two results for the same tokens",
    ),
    (
        "credit",
        "in_loss",
        lambda self, tokens: (tokens.advantages, tokens.log_probs * torch.ones(len(tokens.responses))),
        "in_loss() computes with a tensor on the CPU",
    ),
    ("credit", "marks", lambda self, tokens: tokens.advantages[:2] < 0.0, "what marks() returns has shape (2,)"),
    ("credit", "marks", lambda self, tokens: tokens.entropies, "what marks() returns is torch.float32"),
    (
        "credit",
        "marks",
        lambda self, tokens: torch.rand(len(tokens.responses)) < 0.5,
        "marks() draws from a global random generator",
    ),
    (
        "credit",
        "marked_loss",
        lambda self, tokens, marked, log_ratio: tokens.log_probs,
        "tokens returns has shape (26,)",
    ),
    (
        "credit",
        "marked_loss",
        lambda self, tokens, marked, log_ratio: log_ratio - log_ratio.amax(),
        "marked_loss() of 0 tokens raises RuntimeError",
    ),
    (
        "credit",
        "marked_loss",
        lambda self, tokens, marked, log_ratio: log_ratio.detach(),
        "tokens has no gradient, so it trains nothing",
    ),
    ("credit", "__post_init__", lambda self: None, "share=-1.0, which is out of range, is accepted"),
    (
        "sampling_schedule",
        "factor",
        lambda self, at: 1.0 - at.generated / 10,
        "factor() gives [-3.0] after [40] tokens",
    ),
    ("sampling_schedule", "factor", lambda self, at: at.temperature.unsqueeze(-1), "has shape (7, 1)"),
    (
        "sampling_schedule",
        "factor",
        lambda self, at: at.logits.amax().abs().expand(len(at.logits)),
        "row 0 alone factor() gives",
    ),
    (
        "sampling_schedule",
        "factor",
        lambda self, at: torch.full_like(at.temperature, 1.1 if at.generated.max() >= 0 else 1.0),
        "factor() waits for the device (item(), which an `if` on a tensor calls too)",
    ),
    (
        "sampling_schedule",
        "factor",
        lambda self, at: torch.full((len(at.temperature),), 1.1),
        "factor() returns a tensor on the CPU",
    ),
    ("sampling_schedule", "factor", SamplingSchedule.factor, "neither factor() nor factor_of_step()"),
    ("sampling_schedule", "factor_of_step", lambda self, past, run: 1.0 - len(past) / 50, "0.0 for training step 50"),
    (
        "policy_noise",
        "scale",
        lambda self, step, steps, last, divergence: None,
        "scale() gives None for training step 0",
    ),
    (
        "policy_noise",
        "scale",
        lambda self, step, steps, last, divergence: 0.1 - step,
        "-0.9 for training step 1 of 100",
    ),
    (
        "policy_noise",
        "scale",
        lambda self, step, steps, last, divergence: 0.1 if last is None else 0.1 + 0.0 * divergence,
        "scale() raises TypeError",
    ),
    ("policy_noise", "selects", lambda self, name: None, "selects('model.embed_tokens.weight') gives None"),
    (
        "second_round",
        "prompt",
        lambda self, text, tokenizer, random: tokenizer.encode(text),
        "plain text: prompt() gives [",
    ),
    (
        "second_round",
        "prompt",
        lambda self, text, tokenizer, random: text[text.index("\n") :],
        "plain text: prompt() raises ValueError",
    ),
    ("second_round", "prompt", lambda self, text, tokenizer, source: f"{random()} {text}", "a global random generator"),
    (
        "second_round",
        "prompt",
        lambda self, text, tokenizer, random: f"{next(CALLS)} {text}",
        "for the same draws. Take every draw from the argument `random`",
    ),
    (
        "second_round",
        "prompt",
        lambda self, text, tokenizer, random: f"{text} Think again",
        "prompt() adds 2 tokens, and room is 1",
    ),
    ("second_round", "room", 2.5, "room gives 2.5"),
    ("second_round", "is_needed", lambda self, rewards: None, "is_needed() gives None"),
    (
        "second_round",
        "kept",
        lambda self, rewards, size, random: list(range(len(rewards))),
        "kept() gives [0, 1, 2, 3, 4, 5] for rewards [0.0,",
    ),
    (
        "second_round",
        "kept",
        lambda self, rewards, size, random: [i for i, reward in enumerate(rewards) if reward > 0.0],
        "at most 3 different indices of right responses",
    ),
    ("second_round", "log_ratio", lambda self, log_probs, behavior: (log_probs - behavior).sum(), "has shape ()"),
    (
        "second_round",
        "log_ratio",
        lambda self, log_probs, behavior: (log_probs - behavior).detach(),
        "has no gradient of the policy's log-probabilities",
    ),
    (
        "second_round",
        "log_ratio",
        lambda self, log_probs, behavior: log_probs - behavior.mean(),
        "row 0 alone log_ratio() gives another result",
    ),
    ("second_round", "flags", lambda self, flags: {"algo.kl.init_coef": 0}, "flags() gives {'algo.kl.init_coef': 0}"),
]


@pytest.mark.parametrize(("kind", "attribute", "value", "message"), BROKEN)
def test_a_broken_method_is_said_in_words(
    kind: str, attribute: str, value: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = OWN[kind]
    assert [error for _, error in inspect(own, kind) if error is not None] == []
    monkeypatch.setattr(own, attribute, value)
    errors = [str(error) for _, error in inspect(own, kind) if error is not None]
    assert any(message in error for error in errors), errors


def test_one_of_the_users_own_is_checked_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "m", "--credit", f"{__name__}:Half"]
    assert parse.run_config(words).specs.get("credit")["share"] == 0.5
    assert cli.main(["check", "credit", f"{__name__}:Half"]) == 0
    monkeypatch.setattr(Half, "formula", lambda self, tokens: tokens.advantages / tokens.entropies)
    kinds.check_contract.cache_clear()  # a class does not change while a command runs
    with pytest.raises(UsageError, match=r"credit '.*Half' breaks its contract: .*formula\(\) gives \[nan\]"):
        parse.run_config(words)
    assert cli.main(["check", "credit", f"{__name__}:Half"]) == 1
    assert "WRONG    credit of certain tokens" in capsys.readouterr().out
