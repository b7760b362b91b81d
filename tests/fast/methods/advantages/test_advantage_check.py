# SPDX-License-Identifier: Apache-2.0
"""`ngrpo check advantage`: ours keep the contract, and each way of breaking it is said in words."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ngrpo import cli
from ngrpo.config import kinds, parse
from ngrpo.config.advantage_check import inspect
from ngrpo.methods import advantages
from ngrpo.methods.advantages import Advantage
from perturbations import option
from perturbations.errors import UsageError

WITH_OPTIONS = [
    ("pass_at_k", dict(k=9)),
    ("pkpo", dict(k=9)),
    ("pkpo", dict(variant="loo", k=8)),
    ("ngrpo", dict(n=3)),
]
WITH_DEFAULTS = [(name, {}) for name in sorted(advantages.registry.in_tree())]


@pytest.mark.parametrize(("name", "options"), [*WITH_DEFAULTS, *WITH_OPTIONS])
def test_ours_keep_the_contract(name: str, options: dict) -> None:
    """Rewards between 0 and 1 are no check of Pass@k Training, which refuses them."""
    checks = list(inspect(name, **options))
    assert len(checks) == (9 if name == "pass_at_k" else 10)
    assert [error for _, error in checks if error is not None] == []


@dataclass(frozen=True, kw_only=True)
class Centered(Advantage):
    """Rewards less their mean within the group."""

    name = "centered"
    scale: float = option(1.0, "factor of the result", above=0.0)

    def formula(self, rewards: Tensor, counts: Tensor | None) -> Tensor:
        return self.scale * (rewards - rewards.mean(-1, keepdim=True))


def over_the_batch(self: Centered, rewards: Tensor, counts: Tensor | None) -> Tensor:
    return rewards - rewards.mean()


def divided_by_the_deviation(self: Centered, rewards: Tensor, counts: Tensor | None) -> Tensor:
    return (rewards - rewards.mean(-1, keepdim=True)) / rewards.std(-1, keepdim=True)


def one_number_for_a_group(self: Centered, rewards: Tensor, counts: Tensor | None) -> Tensor:
    return rewards.mean(-1)


def of_eight(self: Centered, rewards: Tensor, counts: Tensor | None) -> Tensor:
    groups = rewards.view(-1, 8)
    return (groups - groups.mean(-1, keepdim=True)).view(rewards.shape)


def in_place(self: Centered, rewards: Tensor, counts: Tensor | None) -> Tensor:
    return rewards.sub_(rewards.mean(-1, keepdim=True))


def twentyfold(self: Centered, rewards: Tensor, counts: Tensor | None) -> Tensor:
    return 20.0 * (rewards - rewards.mean(-1, keepdim=True))


def random(self: Centered, rewards: Tensor, counts: Tensor | None) -> Tensor:
    return rewards + torch.rand_like(rewards)


def failing_at_step_100(self: Centered, step: int) -> Centered:
    if step == 100:
        raise ZeroDivisionError("integer division or modulo by zero")
    return self


def flag_without_dashes(self: Centered, flags: object) -> dict[str, str]:
    return {"algo.kl.init_coef": "0"}


def no_notes(self: Centered, flags: object) -> None:
    return None


@pytest.mark.parametrize(
    ("method", "replacement", "message"),
    [
        ("formula", over_the_batch, "row 0 alone formula() gives another result"),
        ("formula", divided_by_the_deviation, "gives [nan]"),
        ("formula", one_number_for_a_group, "has shape (7,)"),
        ("formula", of_eight, "groups of 9 responses: formula() raises RuntimeError"),
        ("formula", in_place, "changes rewards in place"),
        ("formula", twentyfold, "which OpenRLHF clips to 10. Write largest(self, size)"),
        ("sums_to_zero", True, "sums_to_zero is True, and the advantages of a group sum to"),
        ("formula", random, "An advantage is a function of its rewards"),
        ("at_step", failing_at_step_100, "at_step(100) raises ZeroDivisionError"),
        ("flags", flag_without_dashes, "flags() gives {'algo.kl.init_coef': '0'}"),
        ("notes", no_notes, "notes() gives None"),
    ],
)
def test_a_broken_method_is_said_in_words(
    method: str, replacement: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method == "sums_to_zero":
        monkeypatch.setattr(Centered, "formula", lambda self, rewards, counts: rewards)
    monkeypatch.setattr(Centered, method, replacement)
    errors = [str(error) for _, error in inspect(Centered) if error is not None]
    assert any(message in error for error in errors), errors


def test_what_is_not_finite_is_refused_in_a_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite has rewards from 0 to 1; a reward function may give others, and a NaN would spoil the weights."""
    monkeypatch.setattr(Centered, "formula", lambda self, rewards, counts: rewards.sqrt())
    assert [error for _, error in inspect(Centered) if error is not None] == []
    with pytest.raises(UsageError, match=r"centered: formula\(\) gives \[nan, 1.0\] for the rewards \[-1.0, 1.0\]"):
        Centered().compute(torch.tensor([[0.0, 1.0], [-1.0, 1.0]]))


def test_the_command_of_an_advantage_that_keeps_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "advantage", f"{__name__}:Centered", "scale=2"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("ok ") == 10
    assert f"ngrpo train --advantage {__name__}:Centered" in printed.err


def test_advantages_of_zero_are_noted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert [error for _, error in inspect(Centered) if error is not None] == []
    assert not caplog.records
    monkeypatch.setattr(Centered, "formula", lambda self, rewards, counts: 0.0 * rewards)
    assert [error for _, error in inspect(Centered) if error is not None] == []
    assert "centered: the advantages of right and wrong responses are all 0" in caplog.text


def test_the_command_of_a_broken_advantage(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Centered, "formula", over_the_batch)
    assert cli.main(["check", "advantage", f"{__name__}:Centered"]) == 1
    printed = capsys.readouterr()
    assert "WRONG    advantages of rewards between 0 and 1" in printed.out
    assert "the loss rests on" in printed.err


def test_one_of_the_users_own_is_checked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model", "m", "--advantage", f"{__name__}:Centered"]
    assert parse.run_config(words).specs.get("advantage")["scale"] == 1.0
    monkeypatch.setattr(Centered, "formula", over_the_batch)
    kinds.check_contract.cache_clear()  # a class does not change while a command runs
    with pytest.raises(UsageError, match=r"advantage '.*Centered' breaks its contract: .*row 0 alone"):
        parse.run_config(words)
