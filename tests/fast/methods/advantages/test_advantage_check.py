# SPDX-License-Identifier: Apache-2.0
"""`ngrpo check advantage`: ours keep the contract, and each way of breaking it is said in words."""

from collections.abc import Callable
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

OPTIONS = {"pass_at_k": [dict(k=9)], "pkpo": [dict(k=9), dict(variant="loo", k=8)], "ngrpo": [dict(n=3)]}


@pytest.mark.parametrize(
    ("name", "options"), [(n, o) for n in sorted(advantages.registry.in_tree()) for o in [{}, *OPTIONS.get(n, [])]]
)
def test_ours_keep_the_contract(name: str, options: dict) -> None:
    found = list(inspect(name, **options))
    assert len(found) == (7 if name == "pass_at_k" else 8) and [error for _, error in found if error is not None] == []


@dataclass(frozen=True, kw_only=True)
class Centered(Advantage):
    """Rewards less their mean within the group."""

    name = "centered"
    scale: float = option(1.0, "factor of the result", above=0.0)

    def formula(self, rewards: Tensor, counts: Tensor | None) -> Tensor:
        return self.scale * (rewards - rewards.mean(-1, keepdim=True))


def over_the_batch(self: Centered, rewards: Tensor, counts: Tensor | None) -> Tensor:
    return rewards - rewards.mean()


BROKEN = [
    ("formula", over_the_batch, "row 0 alone formula() gives another result"),
    ("formula", lambda self, r, c: (r - r.mean(-1, True)) / r.std(-1, keepdim=True), "gives [nan]"),
    ("formula", lambda self, r, c: r.mean(-1), "has shape (7,)"),
    ("formula", lambda self, r, c: r.sub_(r.mean(-1, keepdim=True)), "changes rewards in place"),
    ("formula", lambda self, r, c: r + torch.rand_like(r), "An advantage is a function of its rewards"),
    ("at_step", lambda self, step: (1 // (step - 100) and None) or self, "at_step(100) raises ZeroDivisionError"),
    ("flags", lambda self, given: {"algo.kl.init_coef": "0"}, "flags() gives {'algo.kl.init_coef': '0'}"),
    ("notes", lambda self, given: None, "notes() gives None"),
]


@pytest.mark.parametrize(("method", "answer", "words"), BROKEN, ids=[words for *_, words in BROKEN])
def test_a_broken_method_is_said_in_words(
    method: str, answer: Callable, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Centered, method, answer)
    errors = [str(error) for _, error in inspect(Centered) if error is not None]
    assert any(words in error for error in errors), errors


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["check", "advantage", f"{__name__}:Centered", "scale=2"]) == 0
    said = capsys.readouterr()
    assert said.out.count("ok ") == 8 and f"ngrpo train --advantage {__name__}:Centered" in said.err
    monkeypatch.setattr(Centered, "formula", over_the_batch)
    assert cli.main(["check", "advantage", f"{__name__}:Centered"]) == 1
    said = capsys.readouterr()
    assert "WRONG  advantages of rewards between 0 and 1" in said.out and "the loss rests on" in said.err


def test_one_of_the_users_own_is_checked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model", "m", "--advantage", f"{__name__}:Centered"]
    assert parse.run_config(words).specs.get("advantage")["scale"] == 1.0
    monkeypatch.setattr(Centered, "formula", over_the_batch)
    kinds.check_contract.cache_clear()  # a class does not change while a command runs
    with pytest.raises(UsageError, match=r"advantage '.*Centered' breaks its contract: .*row 0 alone"):
        parse.run_config(words)
