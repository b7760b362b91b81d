# SPDX-License-Identifier: Apache-2.0
"""The conformance suite on perturbations whose density breaks a promise, and the driver's view of the tokens' own."""

import sys
import warnings
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.trainers.openrlhf.model_actors import kept_by_actors
from perturbations import available, create
from perturbations.base import Perturbation, Proposal, Replayed
from perturbations.methods.soft_grpo import Gumbel, Normal
from perturbations.registry import get
from perturbations.step import Step
from perturbations.testing import PerturbationError, check_perturbation
from tests.fast.recipes import METHODS, words_of
from tests.fast.run import check_flags, run_of


def broken(**parts: Any) -> type[Perturbation]:
    """SofT-GRPO's perturbation with something replaced."""
    namespace = {"name": "broken", "__module__": __name__, "__qualname__": "Broken", **parts}
    made = dataclass(frozen=True, kw_only=True)(type("Broken", (Gumbel,), namespace))
    globals()["Broken"] = made  # the suite makes it again from its address
    return made


def shifted(self: Gumbel, replayed: Replayed) -> Tensor:
    return Gumbel.log_density(self, replayed)[:-1]


def without_normalizer(self: Gumbel, step: Step) -> Proposal:
    return create("gumbel").propose(step)


def infinite(self: Gumbel, replayed: Replayed) -> Tensor:
    return Gumbel.log_density(self, replayed) - torch.inf


def centred(self: Gumbel, replayed: Replayed) -> Tensor:
    return Gumbel.log_density(self, replayed) - replayed.logits[0, 0].clamp(-5.0, 5.0) * replayed.edit.normalizer[0]


def failing(self: Gumbel, replayed: Replayed) -> Tensor:
    raise KeyError("nothing here")


def double(self: Gumbel, replayed: Replayed) -> Tensor:
    return Gumbel.log_density(self, replayed).double()


def skipping(self: Gumbel, replayed: Replayed) -> Tensor:
    return Gumbel.log_density(self, replayed) if len(replayed.rows) else torch.zeros(0)


def needing_one(self: Gumbel, replayed: Replayed) -> Tensor:
    return Gumbel.log_density(self, replayed) + 0.0 * replayed.edit.normalizer.max()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (dict(log_density=shifted), "one row for each position"),
        (dict(log_density=double), "torch.float64"),
        (dict(log_density=infinite), "must be finite"),
        (dict(log_density=centred), "another batch order"),
        (dict(log_density=failing), "KeyError"),
        (dict(log_density=skipping), "leaves the graph where there are no positions"),
        (dict(log_density=needing_one), "for no positions raises RuntimeError"),
        (dict(propose=without_normalizer), "log_density() raises ValueError"),
    ],
    ids=["shape", "dtype", "infinite", "batch", "raises", "skips", "no positions", "no-normalizer"],
)
def test_broken_densities_are_caught(parts: dict[str, Any], words: str | None) -> None:
    with pytest.raises(PerturbationError) as error:
        check_perturbation(broken(**parts), density="gumbel")
    assert words is None or words in str(error.value)


def test_negative_weights_need_a_declaration() -> None:
    """The perturbation of the tree passes as `affine`; the same one that says nothing is refused."""
    check_perturbation(Normal)
    globals()["Silent"] = silent = dataclass(frozen=True, kw_only=True)(
        type("Silent", (Normal,), {"name": "silent", "mixture": "convex", "__module__": __name__})
    )
    with pytest.raises(PerturbationError, match="must not be negative"):
        check_perturbation(silent)


class FakeGroup:
    """Two ranks with two copies each; the copies of a rank hold the same."""

    def __init__(self, batches: list[list[Tensor]]) -> None:
        self._batches = batches

    def async_run_method(self, method_name: str, what: str) -> list[list[Tensor]]:
        assert (method_name, what) == ("hand_over", "token_log_probs")
        return [batch for batch in self._batches for _ in range(2)]


def maker(batches: list[list[Tensor]]) -> Any:
    args = SimpleNamespace(ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=2))
    return SimpleNamespace(strategy=SimpleNamespace(args=args), actor_model_group=FakeGroup(batches))


def test_what_the_actors_kept_is_one_tensor_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda refs: refs))
    tensors = [torch.full((2, 3 + i), float(i)) for i in range(3)]
    got = kept_by_actors(maker([tensors[:2], tensors[2:]]), "token_log_probs", tensors)
    assert all(torch.equal(a, b) for a, b in zip(got, tensors))
    with pytest.raises(RuntimeError, match="2 batches, 3 were made"):
        kept_by_actors(maker([tensors[:1], tensors[2:]]), "token_log_probs", tensors)


def test_each_recipe_names_a_perturbation_and_its_options() -> None:
    made = []
    for name in METHODS:
        words = words_of(f"methods/{name}")
        flags = {flag.name: " ".join(flag.values) for flag in Flags(words)}
        if flags.get("--perturbation") in (None, "neighbor", "hrpo"):
            continue
        options = {key.split(".", 1)[1]: value for key, value in flags.items() if key.startswith("--perturbation.")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # STHT's fuzzy tokens: the text is never trained
            made.append(create(flags["--perturbation"], **options))
            check_flags(["--actor.model_name_or_path", "m", *words], run_of(perturbation=made[-1].spec()))
        if made[-1].score_only:
            assert flags["--algo.kl.init_coef"] == "0", "KL of unbounded densities"
    in_tree = {name for name, source in available().items() if source.startswith("perturbations.methods")}
    assert {o.name for o in made} == in_tree - {"none", "neighbor", "hrpo"}  # which have recipes of their own
    with_density = {o.name for o in made if o.has_density}
    assert with_density == {n for n in in_tree if any(f.name == "density" for f in fields(get(n)))}
