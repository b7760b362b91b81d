# SPDX-License-Identifier: Apache-2.0
"""Every perturbation keeps the contract; each way of breaking it is caught with words that say how to fix it."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from perturbations import create, registry
from perturbations.base import Perturbation, Proposal, Step
from perturbations.edit import InputEdit
from perturbations.errors import UsageError
from perturbations.options import option
from perturbations.testing import PerturbationError, check_perturbation
from tests.support import shapes


def extremes(option: dataclasses.Field) -> list[Any]:
    """The other choices of an option, or its bounds; a k without an upper one is all tokens of the suite's model."""
    low, high, above, choices = (option.metadata.get(limit) for limit in ("low", "high", "above", "choices"))
    if isinstance(option.default, bool):
        return [not option.default]
    if option.name == "k":
        return [low, high or 64]
    least = low if above is None else above + 1e-3
    return [limit for limit in choices or (least, high) if limit not in (None, option.default)]


def settings(name: str) -> Iterator[dict[str, Any]]:
    """A perturbation's defaults, each of its own options at its extremes, and each density at those of k."""
    own = [each for each in dataclasses.fields(create(name)) if each.name not in Perturbation.option_names()]
    values = {each.name: extremes(each) for each in own}
    yield from ({}, {"entropy_min": 1, "every": 2})
    yield from ({option: value} for option in values for value in values[option])
    for density, k in itertools.product(values.get("density", []), values.get("k", [])):
        yield {"density": density, "k": k}


def accepted(name: str, options: dict[str, Any]) -> bool:
    try:
        create(name, **options)
    except UsageError:
        return False
    return True


IN_TREE_AND_INSTALLED = sorted(registry.available())
CASES = [(name, options) for name in IN_TREE_AND_INSTALLED for options in settings(name) if accepted(name, options)]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_every_perturbation_conforms(name: str, options: dict[str, Any]) -> None:
    check_perturbation(name, **options)


# --- a good perturbation of a third party, and broken ones that each spoil one thing ------------------


@dataclass(frozen=True, kw_only=True)
class Good(Perturbation):
    """Mixes the sampled token with the second likeliest, by a share drawn at each position."""

    name = "good"
    paper = "a test"
    most: float = option(0.5, "largest share of the second", above=0.0, high=1.0)
    mode: str = option("a", "a choice", choices=("a", "b"))

    def propose(self, step: Step) -> Proposal:
        second = step.logits.topk(2, dim=-1).indices[:, 1]
        share = self.most * step.uniform(1).squeeze(-1)
        ids = torch.stack([step.sampled, second], dim=-1)
        return Proposal(InputEdit(ids, torch.stack([1.0 - share, share], dim=-1)), step.sampled)


def test_a_third_partys_perturbation_conforms_as_instance_class_and_address() -> None:
    check_perturbation(Good(most=0.2))
    check_perturbation(Good, most=0.9, mode="b")
    check_perturbation(f"{__name__}:Good", most=1.0)


def proposing(change: Callable[[Step, torch.Tensor, torch.Tensor, torch.Tensor], object]) -> dict[str, Any]:
    """A class's part: the good proposal, changed by ``change(step, ids, weights, tokens)``."""

    def propose(self: Good, step: Step) -> object:
        good = Good.propose(self, step)
        return change(step, good.edit.ids, good.edit.weights, good.tokens)

    return {"propose": propose}


def proposal(ids, weights, tokens, sigma=None) -> Proposal:
    return Proposal(InputEdit(ids, weights, sigma), tokens)


def in_place(step, i, w, t):
    step.logits.mul_(0.5)
    return proposal(i, w, t)


def breaks_down_when_peaked(step, i, w, t):
    if step.logits.max() > 1e3:
        raise RuntimeError("overflow")
    return proposal(i, w, t)


def by_row_number(step, i, w, t):
    rows = torch.arange(len(t)).unsqueeze(-1)
    return proposal(i, torch.where(rows % 2 == 0, w, w.flip(-1)), t)


def nan_where_masked(step, i, w, t):
    return proposal(i, w + 0.0 * step.logits.clamp(max=1e30)[:, :2].exp().log(), t)


CALLS = itertools.count()
PROPOSALS = [
    (lambda s, i, w, t: (i, w, t), ["returns tuple", "Return Proposal"]),
    (lambda s, i, w, t: proposal(i[:, :1], w, t), ["edit.weights", "(7, 2)", "(7, 1)"]),
    (lambda s, i, w, t: proposal(i.int(), w, t), ["edit.ids is torch.int32", "torch.int64"]),
    (lambda s, i, w, t: proposal(i, w.tolist(), t), ["edit.weights is a list", "tensor"]),
    (lambda s, i, w, t: Proposal(InputEdit(i, w), t, t < 0), ["acts is False", "Give the token weight 1"]),
    (lambda s, i, w, t: proposal(i.to("meta"), w, t), ["edit.ids is on meta", "device, cpu"]),
    (lambda s, i, w, t: proposal(i + 64, w, t), ["edit.ids holds", "[0, 63]"]),
    (lambda s, i, w, t: proposal(i, 2 * w, t), ["sum to 2", "normalise"]),
    (lambda s, i, w, t: proposal(i, w + w.new_tensor([1e-4, 0.0]), t), ["sum to 1.0001"]),
    (lambda s, i, w, t: proposal(i, w - w.new_tensor([2.0, -2.0]), t), ["-", "must not be negative"]),
    (nan_where_masked, ["logits with -inf", "edit.weights holds nan", "must be finite"]),
    (lambda s, i, w, t: proposal(i, w, 0 * t + 1), ["logits with -inf", "tokens holds 1", "-inf", "possible token"]),
    (lambda s, i, w, t: proposal(i, w, t, -torch.ones(len(t))), ["edit.sigma holds -1", "not negative"]),
    (lambda s, i, w, t: proposal(i, torch.rand(w.shape).softmax(-1), t), ["global random generator", "step.uniform"]),
    (lambda s, i, w, t: proposal(i, w * (np.random.rand() < 2), t), ["global random generator", "step.uniform"]),
    (lambda s, i, w, t: proposal(i, w * (random.random() < 2), t), ["global random generator", "step.uniform"]),
    (in_place, ["changes step.logits in place", "copy"]),
    (lambda s, i, w, t: proposal(i, w.roll(next(CALLS) % 2, -1), t), ["two results for the same step"]),
    (lambda s, i, w, t: proposal(i, 0 * w + w.mean(0), t), ["row 0 alone", "edit.weights is", "that row alone"]),
    (by_row_number, ["in another batch order", "edit.weights is"]),
    (lambda s, i, w, t: proposal(i, w * (2 if (w < 0).any() else 1), t), ["waits", "(item())", "`if` on a tensor"]),
    (lambda s, i, w, t: proposal(i, w, t.cpu()), ["propose() waits for the device (cpu())", "every token"]),
    (lambda s, i, w, t: proposal(i, w + torch.zeros(len(t), 1), t), ["with a tensor on the CPU", "device="]),
    (lambda s, i, w, t: proposal(i, w.index_put((t < 0,), w[t < 0]), t), ["waits", "nonzero", "indexing with a mask"]),
    (lambda s, i, w, t: proposal(i, w.index_put((t < 0,), w[:1]), t), ["waits", "index_put", "indexing with a mask"]),
    (breaks_down_when_peaked, ["very peaked logits", "RuntimeError: overflow", "any logits"]),
]


def an_option(default: object) -> dict[str, Any]:
    return {"strength": default, "__annotations__": {"strength": float}}


def refuses_models(self: Good, vocabulary: int) -> None:
    raise ValueError("too small")


def refuses(error: Exception) -> Callable[[Good], None]:
    def init(self: Good) -> None:
        if not 0.0 < self.most <= 1.0:
            raise error
        Good.__post_init__(self)

    return init


def drifting(self: Good) -> None:
    Good.__post_init__(self)
    object.__setattr__(self, "most", self.most / 2)


OUT_OF_RANGE = an_option(option(2.0, "a number", low=0.0, high=1.0))
RESERVED = {"config": option("", "a file"), "__annotations__": {"config": str}}
DECLARATIONS = [
    (dict(check_model=refuses_models), ["check_model refuses a vocabulary of 262,144", "too small"]),
    (an_option(1.0), ["'strength'", "no help text", "option(default, help)"]),
    (OUT_OF_RANGE, ["'strength'", "its own default 2.0", "in [0, 1]"]),
    (RESERVED, ["'config'", "reserved", "rename"]),
    (dict(__post_init__=lambda self: None), ["rate=-1.0", "is accepted", "super().__post_init__()"]),
    (dict(__post_init__=refuses(ValueError("no"))), ["most=2.0", "without naming the value", "message"]),
    (dict(__post_init__=drifting), ["create(**spec()) gives", "survive"]),
    (dict(fingerprint=lambda self: f"{Good.fingerprint(self)}{id(self)}"), ["fingerprint() is not stable"]),
    (dict(spec=lambda self: {**Good.spec(self), "most": torch.ones(1)}), ["spec() is not plain data", "scalars"]),
]
BROKEN = [(proposing(change), words) for change, words in PROPOSALS] + DECLARATIONS


@pytest.mark.parametrize(("parts", "words"), BROKEN, ids=[" ".join(words) for _, words in BROKEN])
def test_what_breaks_the_contract_is_said(
    parts: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = type("Broken", (Good,), {**parts, "__module__": __name__, "__qualname__": "Broken", "name": "broken"})
    made = dataclass(frozen=True, kw_only=True)(made)
    monkeypatch.setitem(globals(), "Broken", made)  # findable, as a class at the top of a module is
    np.random.rand()  # in the middle of numpy's block of 624 words a draw moves nothing but its position
    with shapes.unchecked(), pytest.raises(PerturbationError) as error:
        check_perturbation(made)
    for word in ["broken", *words]:
        assert word in str(error.value)


def test_classes_that_are_not_perturbations() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Local(Good):
        name = "local"

    class Plain(Good):
        name = "plain"

    for cls, words in [
        (Local, ["inside a function", "<locals>", "top of a module"]),
        (Plain, ["Plain is not a dataclass", "@dataclass(frozen=True, kw_only=True)"]),
        (Step, ["Step", "derive it from perturbations.Perturbation"]),
    ]:
        with pytest.raises(PerturbationError) as error:
            check_perturbation(cls)
        for word in words:
            assert word in str(error.value)


def test_options_belong_to_a_class_not_to_an_instance() -> None:
    with pytest.raises(ValueError, match="most come too late"):
        check_perturbation(Good(), most=0.1)
    with pytest.raises(ValueError, match=r"no option 'mots'.*'most'"):
        check_perturbation(Good, mots=0.1)
    assert issubclass(PerturbationError, AssertionError)
