# SPDX-License-Identifier: Apache-2.0
"""Every perturbation keeps the contract; each way of breaking it is caught with words that say how to fix it."""

import logging
import random
from dataclasses import dataclass, field
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from perturbations import registry
from perturbations.base import Perturbation, Proposal, Step
from perturbations.edit import InputEdit
from perturbations.methods.soft import Soft
from perturbations.options import option
from perturbations.testing import PerturbationError, check_perturbation
from tests import shapes

OPTIONS = {
    "neighbor": [
        dict(k=2),
        dict(k=7, metric="l1", mix_temperature=0.1),
        dict(metric="l2", skip_special=True, mix_temperature=100.0),
        dict(metric="dot", rate=1.0, realization="sampled"),
        dict(variant="released", rate=1.0),
        dict(variant="released", realization="anchor", until=None, seed=5),
        *([dict(index="hnsw", refresh="never")] if find_spec("faiss") else []),
        dict(skip_same_word=True, refresh="5", k=4),
    ],
    "gaussian": [
        dict(base="fuzzy"),
        dict(base="soft", k=40),
        dict(base="soft", k=1, sigma_of="vector", tau=0.01),
        dict(sigma=0.0),
        dict(density="gaussian"),
        dict(base="fuzzy", density="gaussian"),
        dict(base="soft", density="gaussian"),
    ],
    "gumbel": [
        dict(k=1),
        dict(k=64, top_p=1.0, tau=1e-3),
        dict(clamp=False, tau=10.0),
        dict(top_p=1e-6),
        dict(density="gumbel"),
        dict(density="gumbel", k=64, top_p=1.0),
    ],
    "dirichlet": [
        dict(k=1, density="dirichlet"),
        dict(k=64, top_p=1.0, alpha=0.01, density="dirichlet"),
        dict(alpha=1000.0, density="dirichlet"),
    ],
    "normal": [dict(k=1, density="normal"), dict(k=10, top_p=1.0, density="normal"), dict(top_p=1e-6)],
    "orthogonal": [dict(k=2), dict(k=64, realization="anchor")],
    "soft": [dict(k=1), dict(k=64, top_p=1.0), dict(top_p=1e-6)],
    "multiplex": [
        dict(k=1),
        dict(k=9, weights="average", density="joint"),
        dict(density="joint"),
        dict(k=5, draws="distinct"),
    ],
    "moi": [dict(k=2, beta=0.0), dict(k=64, entropy="top", beta=8.0)],
    "selar": [dict(k=2, threshold=0.0), dict(k=64, threshold=1.0)],
    "cuts": [dict(k=1, delta=0.0), dict(k=64, delta=1.0), dict(burn_in=0)],
    "lepo": [dict(k=1, density="lepo"), dict(k=64, top_p=1.0, tau=0.01, density="lepo"), dict(gate="none")],
    "latent": [
        dict(density="latent"),
        dict(k=1, density="latent", scale=0.0),
        dict(k=64, top_p=1.0, tau=0.5, density="latent"),
        dict(pool=10, top_p=1e-6),
    ],
    "tarpo": [dict(bias=-3.0, k=2), dict(density="token")],
}
IN_TREE_AND_INSTALLED = sorted(registry.available())


def test_the_perturbations_are_found() -> None:
    assert {"none", "neighbor", "gaussian", "gumbel", "soft"} <= set(IN_TREE_AND_INSTALLED)
    assert set(OPTIONS) < set(IN_TREE_AND_INSTALLED)


@pytest.mark.parametrize(
    ("name", "options"),
    [(n, o) for n in IN_TREE_AND_INSTALLED for o in [{}, dict(entropy_min=1, every=2), *OPTIONS.get(n, [])]],
)
def test_every_perturbation_conforms(name: str, options: dict) -> None:
    check_perturbation(name, **options)


def test_randomness_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="perturbations.testing"):
        check_perturbation("gumbel")
        check_perturbation("soft")
    assert [r.message for r in caplog.records] == [
        "gumbel draws weights or tokens from the seed",
        "soft draws no weights or tokens of its own",
    ]


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


def spoiled(cls: type, name: str) -> type:
    """Makes a subclass of Good findable, as a class at the top of a module is."""
    cls = dataclass(frozen=True, kw_only=True)(cls)
    cls.name = name
    return cls


def breaks(change) -> type:
    """A perturbation whose proposal is the good one, changed by ``change(step, ids, weights, tokens)``."""

    def propose(self: Good, step: Step) -> Proposal:
        good = Good.propose(self, step)
        return change(step, good.edit.ids, good.edit.weights, good.tokens)

    name = f"Broken{len(CREATED)}"
    cls = spoiled(type(name, (Good,), {"propose": propose, "__module__": __name__, "__qualname__": name}), name)
    globals()[name] = cls
    CREATED.append(cls)
    return cls


CREATED: list[type] = []
CALLS: list[int] = []


def proposal(ids, weights, tokens, sigma=None) -> Proposal:
    return Proposal(InputEdit(ids, weights, sigma), tokens)


def in_place(step, i, w, t):
    step.logits.mul_(0.5)
    return proposal(i, w, t)


def global_draw(step, i, w, t):
    return proposal(i, torch.softmax(torch.rand(w.shape), -1), t)


def numpy_draw(step, i, w, t):
    return proposal(i, w, t) if np.random.rand() < 2 else None


def python_draw(step, i, w, t):
    return proposal(i, w, t) if random.random() < 2 else None


def stateful(step, i, w, t):
    CALLS.append(1)
    return proposal(i, w.roll(len(CALLS) % 2, -1), t)


def whole_batch(step, i, w, t):
    return proposal(i, torch.softmax(w - step.logits.mean(), 0) * 0 + w.mean(0), t)


def by_row_number(step, i, w, t):
    rows = torch.arange(len(t)).unsqueeze(-1)
    return proposal(i, torch.where(rows % 2 == 0, w, w.flip(-1)), t)


def by_batch_size(step, i, w, t):
    return proposal(i, w if len(t) > 1 else w.flip(-1), t)


def breaks_down_when_peaked(step, i, w, t):
    if step.logits.max() > 1e3:
        raise RuntimeError("overflow")
    return proposal(i, w, t)


def nan_where_masked(step, i, w, t):
    return proposal(i, w + 0.0 * step.logits.clamp(max=1e30)[:, :2].exp().log(), t)


def impossible_token(step, i, w, t):
    return proposal(i, w, torch.full_like(t, 1))


def to_list(step, i, w, t):
    return Proposal(InputEdit(i, w.tolist()), t)


BROKEN = [
    (breaks(lambda s, i, w, t: (i, w, t)), ["returns tuple", "Return Proposal"]),
    (
        breaks(lambda s, i, w, t: proposal(i[:, :1], w, t)),
        ["edit.weights", "(7, 2)", "(7, 1)"],
    ),
    (breaks(lambda s, i, w, t: proposal(i, w[:, :1], t)), ["edit.weights", "(7, 1)", "(7, 2)"]),
    (breaks(lambda s, i, w, t: proposal(i, w, t.unsqueeze(-1))), ["tokens", "(7, 1)", "(7,)"]),
    (breaks(lambda s, i, w, t: proposal(i.int(), w, t)), ["edit.ids is torch.int32", "torch.int64"]),
    (
        breaks(lambda s, i, w, t: proposal(i, w.double(), t)),
        ["edit.weights is torch.float64", "torch.float32"],
    ),
    (breaks(lambda s, i, w, t: proposal(i, w, t.float())), ["tokens is torch.float32", "torch.int64"]),
    (breaks(to_list), ["edit.weights is a list", "tensor"]),
    (
        breaks(lambda s, i, w, t: Proposal(InputEdit(i, w), t, torch.zeros_like(t, dtype=torch.bool))),
        ["acts is False", "Give the token weight 1"],
    ),
    (breaks(lambda s, i, w, t: Proposal(InputEdit(i, w), t, torch.ones_like(t))), ["acts is torch.int64", "bool"]),
    (breaks(lambda s, i, w, t: proposal(i.to("meta"), w, t)), ["edit.ids is on meta", "device, cpu"]),
    (breaks(lambda s, i, w, t: proposal(i + 64, w, t)), ["edit.ids holds", "[0, 63]"]),
    (breaks(lambda s, i, w, t: proposal(i, w, t - 64)), ["tokens holds -", "[0, 63]"]),
    (breaks(lambda s, i, w, t: proposal(i, 2 * w, t)), ["sum to 2", "normalise"]),
    (breaks(lambda s, i, w, t: proposal(i, w + w.new_tensor([1e-4, 0.0]), t)), ["sum to 1.0001"]),
    (breaks(lambda s, i, w, t: proposal(i, w - w.new_tensor([2.0, -2.0]), t)), ["-", "must not be negative"]),
    (breaks(nan_where_masked), ["logits with -inf", "edit.weights holds nan", "must be finite"]),
    (breaks(impossible_token), ["logits with -inf", "tokens holds 1", "-inf", "possible token"]),
    (breaks(lambda s, i, w, t: proposal(i[:, :0], w[:, :0], t)), ["edit.ids", "(7, 0)", "(7, 1)"]),
    (breaks(lambda s, i, w, t: proposal(i, w, t, w)), ["edit.sigma has shape (7, 2)", "(7,)"]),
    (breaks(global_draw), ["global random generator", "step.uniform"]),
    (breaks(numpy_draw), ["global random generator", "step.uniform"]),
    (breaks(python_draw), ["global random generator", "step.uniform"]),
    (breaks(in_place), ["changes step.logits in place", "copy"]),
    (breaks(stateful), ["two results for the same step", "edit.weights is"]),
    (breaks(whole_batch), ["row 0 alone", "edit.weights is", "that row alone"]),
    (breaks(by_row_number), ["in another batch order", "edit.weights is"]),
    (breaks(by_batch_size), ["row 0 alone", "edit.weights is"]),
    (breaks(breaks_down_when_peaked), ["very peaked logits", "RuntimeError: overflow", "any logits"]),
]


@pytest.mark.parametrize(("cls", "words"), BROKEN, ids=[str(words[0])[:40] for _, words in BROKEN])
def test_broken_proposals_are_caught(cls: type, words: list[str]) -> None:
    np.random.rand()  # in the middle of numpy's block of 624 words a draw moves nothing but its position
    with shapes.unchecked(), pytest.raises(PerturbationError) as error:
        check_perturbation(cls)
    for word in [cls.name, *words]:
        assert word in str(error.value)


def an_option(default: object) -> dict:
    return {"strength": default, "__annotations__": {"strength": float}}


def negative_sigma(self: Good, step: Step) -> Proposal:
    good = Good.propose(self, step)
    return proposal(good.edit.ids, good.edit.weights, good.tokens, -torch.ones(len(good.tokens)))


def refuses_models(self: Good, vocabulary: int) -> None:
    raise ValueError("too small")


def refuses(error: Exception):
    def init(self: Good) -> None:
        if not 0.0 < self.most <= 1.0:
            raise error
        Good.__post_init__(self)

    return init


def drifting(self: Good) -> None:
    Good.__post_init__(self)
    object.__setattr__(self, "most", self.most / 2)


RESERVED = {"config": option("", "a file"), "__annotations__": {"config": str}}
DECLARED = {
    "NegativeSigma": (dict(propose=negative_sigma), ["edit.sigma holds -1", "not negative"]),
    "RefusesModels": (dict(check_model=refuses_models), ["check_model refuses a vocabulary of 262,144", "too small"]),
    "NoHelp": (an_option(1.0), ["'strength'", "no help text", "option(default, help)"]),
    "NoDefault": (an_option(field()), ["'strength'", "no default"]),
    "BadDefault": (
        an_option(option(2.0, "a number", low=0.0, high=1.0)),
        ["'strength'", "its own default 2.0", "in [0, 1]"],
    ),
    "TakesReserved": (RESERVED, ["'config'", "reserved", "rename"]),
    "Unchecked": (dict(__post_init__=lambda self: None), ["rate=-1.0", "is accepted", "super().__post_init__()"]),
    "Mute": (dict(__post_init__=refuses(ValueError("no"))), ["most=2.0", "without naming the value", "message"]),
    "WrongError": (dict(__post_init__=refuses(TypeError("no"))), ["most=2.0", "TypeError", "ValueError"]),
    "Drifting": (dict(__post_init__=drifting), ["create(**spec()) gives", "survive"]),
    "Unstable": (
        dict(fingerprint=lambda self: f"{Good.fingerprint(self)}{id(self)}"),
        ["fingerprint() is not stable"],
    ),
    "NotPlain": (
        dict(spec=lambda self: {**Good.spec(self), "most": torch.tensor(0.5)}),
        ["spec() is not plain data", "scalars"],
    ),
}


@pytest.mark.parametrize("name", DECLARED)
def test_broken_declarations_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, words = DECLARED[name]
    made = spoiled(type(name, (Good,), {**parts, "__module__": __name__, "__qualname__": name}), f"test-{name}")
    monkeypatch.setitem(globals(), name, made)
    with pytest.raises(PerturbationError) as error:
        check_perturbation(made)
    for word in [made.name, *words]:
        assert word in str(error.value)


def test_classes_that_are_not_perturbations() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Local(Good):
        name = "local"

    @dataclass(frozen=True, kw_only=True)
    class Nameless(Soft):
        pass

    @dataclass(frozen=True, kw_only=True)
    class Half(Perturbation):
        name = "half"

    class Plain(Good):
        name = "plain"

    for cls, words in [
        (Local, ["inside a function", "<locals>", "top of a module"]),
        (Nameless, ["Nameless has no name of its own", "@register"]),
        (Half, ["half", "propose must be implemented"]),
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
