# SPDX-License-Identifier: Apache-2.0
"""Every bad input of registry and options gets a message with the fix; every good one finds its perturbation."""

import importlib
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from perturbations import UsageError, create, option, registry
from perturbations.methods.neighbor import Neighbor
from tests.support.own_files import clean, install, message, write

__all__ = ["clean"]  # each test in a folder of its own, and what it registers is gone after it


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("neighbr", {}, ["'neighbr'", "Did you mean 'neighbor'?", "Available:", "gaussian", "soft", "./file.py:Name"]),
        ("neighbor", dict(mertic="l2"), ["'neighbor'", "'mertic'", "Did you mean 'metric'?", "burn_in", "rate"]),
        ("neighbor", dict(top_p=0.9), ["'top_p'", "gumbel", "soft", "not to 'neighbor'", "choose 'dirichlet'"]),
        ("neighbor", dict(rate="often"), ["rate='often'", "a number", "in [0, 1]", "0.1"]),
        ("neighbor", dict(rate=None), ["rate=None", "a value is needed", "0.1"]),
        ("neighbor", dict(rate="nan"), ["rate='nan'", "a number"]),
        ("neighbor", dict(k=2.5), ["k=2.5", "a whole number"]),
        ("neighbor", dict(mix_temperature=0), ["mix_temperature=0", "greater than 0", "1.0"]),
        ("neighbor", dict(metric="cosin"), ["metric='cosin'", "cosine, l2, l1, dot", "Did you mean 'cosine'?"]),
        ("neighbor", dict(skip_special="maybe"), ["skip_special='maybe'", "true or false"]),
        ("neighbor", dict(until=7.5), ["until=7.5", "text"]),
        ("none", dict(rate=0.1), ["rate=0.1", "in [0, 0]"]),
        ("gumbel", dict(top_p=0.0), ["top_p=0.0", "in (0, 1]", "0.95"]),
        ("no_such_module:Name", {}, ["no_such_module", "cannot load", "PYTHONPATH"]),
        ("perturbations.base:Step", {}, ["perturbations.base:Step", "not a subclass of perturbations.Perturbation"]),
    ],
)
def test_bad_input_says_value_range_and_mend(name: str, options: dict, words: list[str]) -> None:
    text = message(lambda: create(name, **options))
    for word in words:
        assert word in text, text


@dataclass(frozen=True, kw_only=True)
class OftenNeighbor(Neighbor):
    """Another default, whose declaration repeats no limits."""

    rate: float = option(0.5, "fraction of the positions")
    metric: str = option("l2", "of the neighbors")


def test_a_redeclared_option_keeps_the_limits_of_its_base_class() -> None:
    assert OftenNeighbor().rate == 0.5
    with pytest.raises(UsageError, match=r"rate=1\.5: must be in \[0, 1\]"):
        OftenNeighbor(rate=1.5)
    with pytest.raises(UsageError, match=r"metric='cosin': must be one of cosine, l2, l1, dot\. Did you mean 'cosine'"):
        OftenNeighbor(metric="cosin")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("neighbor", {}),
        ("soft", {}),
        ("gumbel", {}),
        ("gaussian", {"base": "soft"}),
    ],
)
def test_k_beyond_the_vocabulary(name: str, options: dict) -> None:
    perturbation = create(name, k=5, **options)
    text = message(lambda: perturbation.check_model(4))
    assert "k=5" in text
    assert ", 4]" in text
    perturbation.check_model(5)


# --- values of the command line -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("rate", "0.25", 0.25),
        ("k", "4", 4),
        ("k", "1e1", 10),
        ("seed", str(2**62 + 1), 2**62 + 1),
        ("skip_special", "true", True),
        ("until", "none", None),
        ("entropy_min", "None", None),
    ],
)
def test_text_becomes_the_type_of_the_field(field: str, text: str, value: object) -> None:
    read = getattr(create("neighbor", **{field: text}), field)
    assert read == value
    assert type(read) is type(value)


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a:b", "mine.py", "two words", "one,two", ""])
def test_a_name_that_a_flag_would_read_otherwise_is_refused(name: str) -> None:
    words = message(lambda: registry.register(name))
    assert f"@register({name!r}): the name of a perturbation has letters, digits, '_' and '-' alone" in words


def test_a_registered_perturbation_elsewhere_is_found_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("their_registered.py", decorator='@register("theirs")')
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("their_registered")
    perturbation = create("theirs")
    assert registry.available()["theirs"] == "their_registered"
    # Another process has not imported the module, so the spec must not rely on the short name.
    assert perturbation.spec()["name"] == "their_registered:Mine"
    registry.perturbations.registered.pop("theirs")
    assert create(**perturbation.spec()) == perturbation


def test_entry_point_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("their_installed.py")
    install(
        tmp_path, monkeypatch, registry.perturbations, "wobble = their_installed:Mine\nbroken = their_missing:Mine\n"
    )
    assert registry.available()["wobble"] == "their_installed:Mine"
    assert "their_installed" not in sys.modules  # listing names imports nothing
    perturbation = create("wobble", strength=1)
    assert perturbation.spec()["name"] == "wobble"
    assert create(**perturbation.spec()) == perturbation
    assert "Did you mean 'wobble'?" in message(lambda: create("woble"))
    assert "their_missing" in message(lambda: create("broken"))


def test_an_entry_point_with_a_name_of_the_tree_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("their_installed.py")
    install(tmp_path, monkeypatch, registry.perturbations, "neighbor = their_installed:Mine\n")
    with pytest.warns(UserWarning, match="'neighbor' is the in-tree method, which hides their_installed:Mine"):
        assert create("neighbor").k == 3
    # Another process would make the tree's method of its name.
    assert create("their_installed:Mine").spec()["name"] == "their_installed:Mine"


def test_duplicate_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("their_first.py", decorator='@register("twice")')
    write("their_second.py", decorator='@register("twice")')
    monkeypatch.syspath_prepend(tmp_path)
    first = importlib.import_module("their_first")
    text = message(lambda: importlib.import_module("their_second"))
    for word in ("'twice'", "their_first.Mine", "another name"):
        assert word in text
    importlib.reload(first)  # the same class again is no duplicate


# --- specs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "weights", "realization", "space"),
    [
        pytest.param({}, "logits", "anchor", "input", id="paper"),
        pytest.param({"variant": "released"}, "probs", "sampled", "output", id="released"),
        pytest.param(
            {"variant": "released", "space": "input", "realization": "anchor"},
            "probs",
            "anchor",
            "input",
            id="released, with two options set",
        ),
    ],
)
def test_variant_sets_three_options_unless_they_are_set(
    options: dict, weights: str, realization: str, space: str
) -> None:
    """Also in a perturbation that is made from its spec."""
    neighbor = create("neighbor", **options)
    for perturbation in (neighbor, create(**neighbor.spec())):
        assert perturbation.weights == weights
        assert perturbation.realization == realization
        assert perturbation.space == space


def test_a_greedy_text_warns() -> None:
    with pytest.warns(UserWarning, match="greedy decoding"):
        create("neighbor", rate=1.0)
    with pytest.warns(UserWarning, match="sampled"):
        create("neighbor", rate=1.0, variant="released", realization="anchor")


def test_a_text_that_is_not_greedy_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        create("neighbor", rate=1.0, realization="sampled")
        create("neighbor", rate=1.0, variant="released")
        create("neighbor", rate=0.99)
        for options in ({"every": 2}, {"burn_in": 5}, {"entropy_min": 1.0}):  # tokens at other positions are sampled
            create("neighbor", rate=1.0, **options)


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        (
            "neighbor",
            {
                "rate": 0.1,
                "k": 3,
                "metric": "cosine",
                "until": "</think>",
                "mix_temperature": 1.0,
                "skip_special": False,
            },
        ),
        (
            "gumbel",
            {
                "rate": 1.0,
                "k": 5,
                "top_p": 0.95,
                "tau": 0.1,
                "clamp": True,
            },
        ),
        (
            "gaussian",
            {
                "rate": 1.0,
                "sigma": 0.33,
                "sigma_of": "embedding",
                "tau": 0.5,
            },
        ),
    ],
    ids=["neighbor", "gumbel", "gaussian"],
)
def test_defaults_are_those_of_the_papers(name: str, defaults: dict[str, object]) -> None:
    perturbation = create(name)
    for name_of_option, default in defaults.items():
        assert getattr(perturbation, name_of_option) == default, name_of_option
