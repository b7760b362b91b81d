# SPDX-License-Identifier: Apache-2.0
"""Every perturbation keeps the contract; each way of breaking it is caught with words that say how to fix it."""

import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from perturbations import Gate, create, registry
from perturbations.base import Perturbation, Proposal, Step
from perturbations.edit import InputEdit
from perturbations.errors import UsageError
from perturbations.options import option
from perturbations.testing import PerturbationError, check_perturbation
from tests.support import shapes

# --- perturbations of the tree, and installed ones --------------------------------------------------------


def extremes(field: dataclasses.Field) -> list[Any]:
    """The other choices of an option, or its bounds; a k without an upper one is all tokens of the suite's model."""
    limits = field.metadata
    if isinstance(field.default, bool):
        return [not field.default]
    if field.name == "k":
        return [limits.get("low"), limits.get("high") or 64]
    if limits.get("choices"):
        return [choice for choice in limits["choices"] if choice != field.default]
    least = limits.get("low")
    if limits.get("above") is not None:
        least = limits["above"] + 1e-3
    bounds = [least, limits.get("high")]
    return [bound for bound in bounds if bound is not None and bound != field.default]


def settings(name: str) -> Iterator[dict[str, Any]]:
    """A perturbation's defaults, each of its own options at its extremes, and each density at those of k."""
    extremes_of = {}
    for field in dataclasses.fields(create(name)):
        if field.name not in Perturbation.option_names():
            extremes_of[field.name] = extremes(field)
    yield {}
    yield {"entropy_min": 1, "every": 2}
    for option_name, values in extremes_of.items():
        for value in values:
            yield {option_name: value}
    for density, k in itertools.product(extremes_of.get("density", []), extremes_of.get("k", [])):
        yield {"density": density, "k": k}


def accepted_settings() -> Iterator[tuple[str, dict[str, Any]]]:
    """The settings of every perturbation that its options allow."""
    for name in sorted(registry.available()):
        for options in settings(name):
            try:
                create(name, **options)
            except UsageError:
                continue
            yield name, options


@pytest.mark.parametrize(("name", "options"), accepted_settings(), ids=str)
def test_every_perturbation_conforms(name: str, options: dict[str, Any]) -> None:
    check_perturbation(name, **options)


# --- a good perturbation of a third party -----------------------------------------------------------------


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
        weights = torch.stack([1.0 - share, share], dim=-1)
        return Proposal(InputEdit(ids, weights), step.sampled)


def test_a_third_partys_perturbation_conforms_as_instance_class_and_address() -> None:
    check_perturbation(Good(most=0.2))
    check_perturbation(Good, most=0.9, mode="b")
    check_perturbation(f"{__name__}:Good", most=1.0)


def test_the_example_of_neighbors_conforms(tmp_path: Path) -> None:
    page = (Path(__file__).parents[4] / "docs/own_perturbation.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```python\n(# near\.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "near.py").write_text(text, encoding="utf-8")
    check_perturbation(str(tmp_path / "near.py"))


def test_options_belong_to_a_class_not_to_an_instance() -> None:
    with pytest.raises(ValueError, match="most come too late"):
        check_perturbation(Good(), most=0.1)
    with pytest.raises(ValueError, match=r"no option 'mots'.*'most'"):
        check_perturbation(Good, mots=0.1)


def test_a_broken_contract_is_an_assertion_error() -> None:
    assert issubclass(PerturbationError, AssertionError)


def assert_refused(perturbation: type, messages: list[str]) -> None:
    """Asserts that the suite refuses a class, and says all of this."""
    with shapes.unchecked(), pytest.raises(PerturbationError) as error:
        check_perturbation(perturbation)
    for message in messages:
        assert message in str(error.value)


def test_a_class_inside_a_function_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Local(Good):
        name = "local"

    assert_refused(Local, ["inside a function", "<locals>", "top of a module"])


def test_a_class_that_is_no_dataclass_is_refused() -> None:
    class Plain(Good):
        name = "plain"

    assert_refused(Plain, ["Plain is not a dataclass", "@dataclass(frozen=True, kw_only=True)"])


def test_a_class_that_is_no_perturbation_is_refused() -> None:
    assert_refused(Step, ["Step", "derive it from perturbations.Perturbation"])


# --- broken ones that each spoil one thing ----------------------------------------------------------------


def check_broken(attributes: dict[str, Any], messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Asserts that the suite refuses ``Good`` with these attributes in place of its own, and says all of this."""
    of_class = {"__module__": __name__, "__qualname__": "Broken", "name": "broken"}
    broken = type("Broken", (Good,), {**attributes, **of_class})
    broken = dataclass(frozen=True, kw_only=True)(broken)
    monkeypatch.setitem(globals(), "Broken", broken)  # findable, as a class at the top of a module is
    np.random.rand()  # in the middle of numpy's block of 624 words a draw moves nothing but its position
    assert_refused(broken, ["broken", *messages])


def propose(ids: Any, weights: Any, tokens: Tensor, sigma: Tensor | None = None) -> Proposal:
    return Proposal(InputEdit(ids, weights, sigma), tokens)


# What a proposal is changed to: functions of the step and of the good proposal's ids, weights (B, 2) and tokens (B,).


def as_a_tuple(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return ids, weights, tokens


def with_fewer_ids(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(ids[:, :1], weights, tokens)


def with_int32_ids(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(ids.int(), weights, tokens)


def with_a_list_of_weights(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(ids, weights.tolist(), tokens)


def mixed_where_it_does_not_act(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return Proposal(InputEdit(ids, weights), tokens, acts=tokens < 0)


def on_another_device(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(ids.to("meta"), weights, tokens)


def with_ids_beyond_the_vocabulary(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(ids + 64, weights, tokens)


def with_the_token_after(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(torch.stack([tokens, tokens + 1], dim=-1), weights, tokens)


def with_the_token_before(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(torch.stack([tokens, tokens - 1], dim=-1), weights, tokens)


def with_doubled_weights(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(ids, 2 * weights, tokens)


def with_weights_nearly_normalised(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(ids, weights + weights.new_tensor([1e-4, 0.0]), tokens)


def with_negative_weights(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(ids, weights - weights.new_tensor([2.0, -2.0]), tokens)


def nan_where_masked(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    zero_or_nan = 0.0 * step.logits.clamp(max=1e30)[:, :2].exp().log()
    return propose(ids, weights + zero_or_nan, tokens)


def with_an_excluded_token(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(ids, weights, torch.ones_like(tokens))


def with_negative_sigma(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(ids, weights, tokens, sigma=-torch.ones(len(tokens)))


def by_torchs_global_draw(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(ids, torch.rand(weights.shape).softmax(-1), tokens)


def by_numpys_global_draw(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(ids, weights * (np.random.rand() < 2), tokens)


def by_pythons_global_draw(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(ids, weights * (random.random() < 2), tokens)


def in_place(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    step.logits.mul_(0.5)
    return propose(ids, weights, tokens)


def in_place_of_the_model(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    directions = step.embeddings.matrix()
    directions /= directions.norm(dim=-1, keepdim=True).clamp_min(1e-6)
    return propose(ids, weights, tokens)


def of_embeddings_in_their_dtype(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    embeddings = step.embeddings.lookup(ids)
    return propose(ids, (embeddings * embeddings[:, :1]).sum(-1).softmax(-1), tokens)


CALLS = itertools.count()


def by_the_number_of_calls(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(ids, weights.roll(next(CALLS) % 2, -1), tokens)


def by_the_batch_s_mean(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(ids, weights.mean(0).expand(len(tokens), -1) + 0 * weights, tokens)


def by_the_row_s_number(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    rows = torch.arange(len(tokens)).unsqueeze(-1)
    return propose(ids, torch.where(rows % 2 == 0, weights, weights.flip(-1)), tokens)


def with_an_if(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    if (weights < 0).any():
        return propose(ids, 2 * weights, tokens)
    return propose(ids, weights, tokens)


def with_a_copy_to_the_cpu(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(ids, weights, tokens.cpu())


def with_a_tensor_on_the_cpu(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(ids, weights + torch.zeros(len(tokens), 1), tokens)


def with_weights_on_the_cpu(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(ids, torch.full((len(ids), 2), 0.5), tokens)


def with_acts_on_the_cpu(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return Proposal(InputEdit(ids, weights), tokens, acts=torch.ones(len(ids), dtype=torch.bool))


def with_a_mask_read_and_written(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    mask = tokens < 0
    return propose(ids, weights.index_put((mask,), weights[mask]), tokens)


def with_a_mask_written(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    return propose(ids, weights.index_put((tokens < 0,), weights[:1]), tokens)


def failing_when_peaked(step: Step, ids: Tensor, weights: Tensor, tokens: Tensor) -> object:
    if step.logits.max() > 1e3:
        raise RuntimeError("overflow")
    return propose(ids, weights, tokens)


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (as_a_tuple, ["returns tuple", "Return Proposal"]),
        (with_fewer_ids, ["edit.weights", "(7, 2)", "(7, 1)"]),
        (with_int32_ids, ["edit.ids is torch.int32", "torch.int64"]),
        (with_a_list_of_weights, ["edit.weights is a list", "tensor"]),
        (mixed_where_it_does_not_act, ["acts is False", "Give the token weight 1"]),
        (on_another_device, ["edit.ids is on meta", "device, cpu"]),
        (with_ids_beyond_the_vocabulary, ["edit.ids holds", "[0, 63]", "check_model(self, vocabulary)"]),
        (with_the_token_after, ["very peaked logits: edit.ids holds 64", "[0, 63]", "the first or the last"]),
        (with_the_token_before, ["edit.ids holds -1", "[0, 63]", "the first or the last"]),
        (with_doubled_weights, ["sum to 2", "normalise"]),
        (with_weights_nearly_normalised, ["sum to 1.0001"]),
        (with_negative_weights, ["-", "must not be negative"]),
        (nan_where_masked, ["logits with -inf", "edit.weights holds nan", "must be finite"]),
        (with_an_excluded_token, ["logits with -inf", "tokens holds 1", "-inf", "possible token"]),
        (with_negative_sigma, ["edit.sigma holds -1", "not negative"]),
        (by_torchs_global_draw, ["global random generator", "step.uniform"]),
        (by_numpys_global_draw, ["global random generator", "step.uniform"]),
        (by_pythons_global_draw, ["global random generator", "step.uniform"]),
        (in_place, ["changes step.logits in place", "copy"]),
        (in_place_of_the_model, ["changes step.embeddings.matrix() in place", "copy"]),
        (of_embeddings_in_their_dtype, ["edit.weights is torch.bfloat16", ".to(torch.float32)"]),
        (by_the_number_of_calls, ["two results for the same step"]),
        (by_the_batch_s_mean, ["row 0 alone", "edit.weights is", "that row alone"]),
        (by_the_row_s_number, ["in another batch order", "edit.weights is"]),
        (with_an_if, ["waits", "(item(), which an `if` on a tensor calls too)", "use torch.where"]),
        (with_a_copy_to_the_cpu, ["propose() waits for the device (cpu())", "every token"]),
        (with_a_tensor_on_the_cpu, ["with a tensor on the CPU", "device="]),
        (with_weights_on_the_cpu, ["propose() returns a tensor on the CPU (edit.weights)", "device="]),
        (with_acts_on_the_cpu, ["propose() returns a tensor on the CPU (acts)", "device="]),
        (with_a_mask_read_and_written, ["waits", "nonzero", "indexing with a mask"]),
        (with_a_mask_written, ["waits", "index_put", "indexing with a mask"]),
        (failing_when_peaked, ["very peaked logits", "RuntimeError: overflow", "any logits"]),
    ],
)
def test_a_broken_proposal_is_said(change: Callable, messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_propose(self: Good, step: Step) -> object:
        good = Good.propose(self, step)
        return change(step, good.edit.ids, good.edit.weights, good.tokens)

    check_broken({"propose": broken_propose}, messages, monkeypatch)


# What a class's options and methods are changed to.


def refuses_models(self: Good, vocabulary: int) -> None:
    raise ValueError("too small")


def accepts_anything(self: Good) -> None:
    pass


def refuses_without_the_value(self: Good) -> None:
    if not 0.0 < self.most <= 1.0:
        raise ValueError("no")
    Good.__post_init__(self)


def halves_an_option(self: Good) -> None:
    Good.__post_init__(self)
    object.__setattr__(self, "most", self.most / 2)


def fingerprint_of_the_object(self: Good) -> str:
    return f"{Good.fingerprint(self)}{id(self)}"


def spec_with_a_tensor(self: Good) -> dict[str, Any]:
    return {**Good.spec(self), "most": torch.ones(1)}


def with_option(name: str, type_: type, default: object) -> dict[str, Any]:
    """The attributes of a class with one more option."""
    return {name: default, "__annotations__": {name: type_}}


@pytest.mark.parametrize(
    ("attributes", "messages"),
    [
        pytest.param(
            {"check_model": refuses_models},
            ["check_model refuses a vocabulary of 262,144", "too small"],
            id="refuses all models",
        ),
        pytest.param(
            with_option("strength", float, 1.0),
            ["'strength'", "no help text", "option(default, help)"],
            id="option without help",
        ),
        pytest.param(
            with_option("strength", float, option(2.0, "a number", low=0.0, high=1.0)),
            ["'strength'", "its own default 2.0", "in [0, 1]"],
            id="default out of range",
        ),
        pytest.param(
            with_option("config", str, option("", "a file")),
            ["'config'", "reserved", "rename"],
            id="reserved name",
        ),
        pytest.param(
            with_option("strength", int, option(0.5, "a number")),
            ["its own default 0.5", "a whole number is needed. Change the default"],
            id="default of another type",
        ),
        pytest.param(
            with_option("strength", int | float, option(1, "a number")),
            ["'strength' has a type that a command line cannot give (int | float)", "Annotate it as int"],
            id="two types",
        ),
        pytest.param(
            with_option("strength", list[int] | None, option(None, "numbers")),
            ["cannot give (list[int] | None)", "one of these with `| None`"],
            id="optional list",
        ),
        pytest.param(
            with_option("strength", Tensor, option(None, "numbers")),
            ["cannot give (torch.Tensor)", "Annotate it as int"],
            id="tensor",
        ),
        pytest.param(
            with_option("every", str, option("a", "another meaning")),
            ["redeclares it as str", "Redeclare 'every' as int", "only default, help and narrower limits may change"],
            id="redeclared as text",
        ),
        pytest.param(
            with_option("rate", int, option(1, "another type")),
            ["redeclares it as int", "Redeclare 'rate' as float"],
            id="redeclared as int",
        ),
        pytest.param(
            with_option("protect", int, option(3, "a token")),
            ["redeclares it as int", "Redeclare 'protect' as str | None"],
            id="redeclared without None",
        ),
        pytest.param(
            with_option("gate", str | Gate | None, option(None, "a gate's name")),
            ["Redeclare 'gate' as str | perturbations.gates.Gate | None with its registry="],
            id="redeclared without its registry",
        ),
        pytest.param(
            {"__post_init__": accepts_anything},
            ["rate=-1.0", "is accepted", "super().__post_init__()"],
            id="accepts anything",
        ),
        pytest.param(
            {"__post_init__": refuses_without_the_value},
            ["most=2.0", "without naming the value", "message"],
            id="refuses without the value",
        ),
        pytest.param(
            {"__post_init__": halves_an_option},
            ["create(**spec()) gives", "survive"],
            id="changes an option",
        ),
        pytest.param(
            {"draws_token": lambda self: False},
            ["its 'draws_token' is a method", "@property"],
            id="method in place of a property",
        ),
        pytest.param(
            {"rate": 0.5},
            ["its rate = 0.5 has no annotation", "Write rate: float = option(0.5,"],
            id="option without an annotation",
        ),
        pytest.param(
            {"learning_rates": lambda self, name: 0.1},
            ["nothing reads its 'learning_rates'", "Did you mean 'learning_rate'?"],
            id="misspelled method",
        ),
        pytest.param(
            {"fingerprint": fingerprint_of_the_object},
            ["fingerprint() is not stable"],
            id="fingerprint of the object",
        ),
        pytest.param(
            {"spec": spec_with_a_tensor},
            ["spec() is not plain data", "scalars"],
            id="tensor in the spec",
        ),
    ],
)
def test_a_broken_declaration_is_said(
    attributes: dict[str, Any], messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_broken(attributes, messages, monkeypatch)


@pytest.mark.parametrize("choices", ["abc", (1, 2)])
def test_choices_are_texts(choices: Any) -> None:
    with pytest.raises(UsageError, match=r"choices=.* must be a tuple or list of texts, such as \('a', 'b'\)"):
        option("a", "a choice", choices=choices)


# --- more candidates than the smallest model has tokens ---------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ManyCandidates(Perturbation):
    """Mixes the k likeliest tokens."""

    name = "many_candidates"
    k: int = option(100, "number of tokens mixed", low=1)

    def propose(self, step: Step) -> Proposal:
        values, ids = step.top(self.k)
        return Proposal(InputEdit(ids, values.softmax(-1)), step.sampled)


def test_more_candidates_than_tokens_are_refused_with_the_two_ways_out() -> None:
    assert_refused(ManyCandidates, ["step.top(100) of 64 tokens", "check_model(self, vocabulary)", "min(k, "])


def test_check_model_chooses_the_vocabulary_of_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_model(self: ManyCandidates, vocabulary: int) -> None:
        if self.k > vocabulary:
            raise UsageError(f"k={self.k} of {vocabulary} tokens")

    monkeypatch.setattr(ManyCandidates, "check_model", check_model)
    check_perturbation(ManyCandidates)


# --- what breaks no promise and does nothing --------------------------------------------------------------


def test_a_perturbation_that_never_acts_is_noted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check_perturbation(Good)
    assert not caplog.records

    def never(self: Good, step: Step) -> Proposal:
        ids = step.sampled.unsqueeze(-1)
        return Proposal(InputEdit(ids, torch.ones_like(ids).float()), step.sampled, acts=step.sampled < 0)

    monkeypatch.setattr(Good, "propose", never)
    check_perturbation(Good)
    assert "good acts at 0 of 49 positions of this check" in caplog.text
