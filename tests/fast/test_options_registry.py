# SPDX-License-Identifier: Apache-2.0
"""Every bad input of registry and options gets a message with the fix; every good one finds its perturbation."""

import importlib
import sys
import warnings
from pathlib import Path

import pytest

from perturbations import registry
from perturbations.registry import create

PERTURBATION = """
from dataclasses import dataclass
from perturbations import Perturbation, Proposal, option, register
from perturbations.edit import one_hot

{decorator}
@dataclass(frozen=True, kw_only=True)
class {name}(Perturbation):
    paper = "a test"
    strength: float = option(0.5, "a number", low=0.0, high=1.0)

    def propose(self, step):
        return Proposal(one_hot(step.sampled), step.sampled)
"""


@pytest.fixture(autouse=True)
def clean_registry(monkeypatch: pytest.MonkeyPatch):
    """What a test registers or imports is gone after it."""
    for kind in (registry.perturbations, registry.gates):
        for name in kind.in_tree():
            kind.get(name)
        monkeypatch.setattr(kind, "registered", dict(kind.registered))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("their_"):
            del sys.modules[name]


def write_module(folder: Path, name: str, perturbation: str = "Theirs", decorator: str = "") -> None:
    (folder / f"{name}.py").write_text(PERTURBATION.format(name=perturbation, decorator=decorator))


def message(call) -> str:
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("neighbr", {}, ["'neighbr'", "Did you mean 'neighbor'?", "Available:", "gaussian", "soft", "./file.py:Name"]),
        ("neighbor", dict(mertic="l2"), ["'neighbor'", "'mertic'", "Did you mean 'metric'?", "burn_in", "rate"]),
        ("neighbor", dict(top_p=0.9), ["'top_p'", "gumbel", "soft", "not to 'neighbor'", "choose 'dirichlet'"]),
        ("soft", dict(metric="l2"), ["'metric'", "belongs to perturbation neighbor", "choose 'neighbor'"]),
        ("neighbor", dict(rate=1.5), ["rate=1.5", "in [0, 1]", "0.1"]),
        ("neighbor", dict(rate="often"), ["rate='often'", "a number", "in [0, 1]", "0.1"]),
        ("neighbor", dict(rate=True), ["rate=True", "a number"]),
        ("neighbor", dict(rate=None), ["rate=None", "a value is needed", "0.1"]),
        ("neighbor", dict(rate="nan"), ["rate='nan'", "a number"]),
        ("neighbor", dict(k=1), ["k=1", "at least 2", "3"]),
        ("neighbor", dict(k=2.5), ["k=2.5", "a whole number"]),
        ("neighbor", dict(k="1e999"), ["k='1e999'", "a whole number"]),
        ("neighbor", dict(mix_temperature=0), ["mix_temperature=0", "greater than 0", "1.0"]),
        ("neighbor", dict(mix_temperature=10**400), ["mix_temperature=1000", "a number"]),
        ("neighbor", dict(metric="cosin"), ["metric='cosin'", "cosine, l2, l1, dot", "Did you mean 'cosine'?"]),
        ("neighbor", dict(metric=3), ["metric=3", "text"]),
        ("neighbor", dict(skip_special="maybe"), ["skip_special='maybe'", "true or false"]),
        ("neighbor", dict(until=7), ["until=7", "text"]),
        ("none", dict(rate=0.1), ["rate=0.1", "in [0, 0]"]),
        ("gumbel", dict(top_p=0.0), ["top_p=0.0", "in (0, 1]", "0.95"]),
        ("no_such_module:Name", {}, ["no_such_module", "cannot load", "PYTHONPATH"]),
        ("perturbations.base:Nothing", {}, ["perturbations.base:Nothing", "cannot load"]),
        ("perturbations.base:Step", {}, ["perturbations.base:Step", "not a subclass of perturbations.Perturbation"]),
    ],
)
def test_bad_input_says_value_range_and_mend(name: str, options: dict, words: list[str]) -> None:
    text = message(lambda: create(name, **options))
    for word in words:
        assert word in text, text


@pytest.mark.parametrize(
    ("name", "k", "vocabulary"), [("neighbor", 5, 4), ("soft", 5, 4), ("gumbel", 5, 4), ("gaussian", 5, 4)]
)
def test_k_beyond_the_vocabulary(name: str, k: int, vocabulary: int) -> None:
    extra = dict(base="soft") if name == "gaussian" else {}
    perturbation = create(name, k=k, **extra)
    text = message(lambda: perturbation.check_model(vocabulary))
    assert f"k={k}" in text and f", {vocabulary}]" in text
    perturbation.check_model(k)


# --- values of the command line -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (dict(rate="0.25"), "rate", 0.25),
        (dict(rate=0), "rate", 0.0),
        (dict(k="4"), "k", 4),
        (dict(k="4.0"), "k", 4),
        (dict(k="1e1"), "k", 10),
        (dict(seed=2**62 + 1), "seed", 2**62 + 1),
        (dict(seed=str(2**62 + 1)), "seed", 2**62 + 1),
        (dict(skip_special="true"), "skip_special", True),
        (dict(skip_special="False"), "skip_special", False),
        (dict(until="none"), "until", None),
        (dict(until="</end>"), "until", "</end>"),
        (dict(entropy_min="None"), "entropy_min", None),
    ],
)
def test_text_becomes_the_type_of_the_field(options: dict, field: str, value: object) -> None:
    got = getattr(create("neighbor", **options), field)
    assert got == value and type(got) is type(value)


# --- names ----------------------------------------------------------------------------------------


def test_module_and_name_from_a_folder_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, "their_plain")
    monkeypatch.syspath_prepend(tmp_path)
    perturbation = create("their_plain:Theirs", strength="0.25", rate=0.5)
    assert (perturbation.strength, perturbation.rate) == (0.25, 0.5)
    assert perturbation.spec()["name"] == "their_plain:Theirs"
    assert create(**perturbation.spec()) == perturbation
    assert "strength=2" in message(lambda: create("their_plain:Theirs", strength=2))


def test_a_registered_perturbation_elsewhere_is_found_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, "their_registered", decorator='@register("theirs")')
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("their_registered")
    perturbation = create("theirs")
    assert registry.available()["theirs"] == "their_registered"
    # Another process has not imported the module, so the spec must not rely on the short name.
    assert perturbation.spec()["name"] == "their_registered:Theirs"
    registry.perturbations.registered.pop("theirs")
    assert create(**perturbation.spec()) == perturbation


def install(folder: Path, package: str, entries: str) -> None:
    """What pip leaves behind for a package with entry points."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.perturbations.group}]\n{entries}\n")


def test_entry_point_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, "their_installed")
    install(tmp_path, "their_dist", "wobble = their_installed:Theirs\nbroken = their_missing:Theirs")
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.available()["wobble"] == "their_installed:Theirs"
    assert "their_installed" not in sys.modules  # listing names imports nothing
    perturbation = create("wobble", strength=1)
    assert perturbation.spec()["name"] == "wobble" and create(**perturbation.spec()) == perturbation
    assert "Did you mean 'wobble'?" in message(lambda: create("woble"))
    assert "their_missing" in message(lambda: create("broken"))


def test_a_subclass_without_a_name_is_not_taken_for_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_subclass.py").write_text(
        "from dataclasses import dataclass\n"
        "from perturbations.methods.soft import Soft\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Softer(Soft):\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    perturbation = create("their_subclass:Softer")
    assert perturbation.spec()["name"] == "their_subclass:Softer"
    assert type(create(**perturbation.spec())) is type(perturbation)
    assert type(perturbation)().spec() != create("soft").spec()
    module = sys.modules["their_subclass"]
    del module.Softer.name  # as when it is made directly, not through the registry
    assert module.Softer().spec()["name"] == "their_subclass:Softer"


def test_duplicate_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, "their_first", decorator='@register("twice")')
    write_module(tmp_path, "their_second", decorator='@register("twice")')
    write_module(tmp_path, "their_clash", decorator='@register("neighbor")')
    monkeypatch.syspath_prepend(tmp_path)
    first = importlib.import_module("their_first")
    text = message(lambda: importlib.import_module("their_second"))
    assert "'twice'" in text
    assert "their_first.Theirs" in text
    assert "another name" in text
    importlib.reload(first)  # the same class again is no duplicate
    registry.perturbations.registered.pop("neighbor")  # even before ours was imported
    text = message(lambda: importlib.import_module("their_clash"))
    assert "'neighbor'" in text and "their_clash.Theirs" in text


# --- specs ----------------------------------------------------------------------------------------


def test_variant_sets_three_options_unless_they_are_set() -> None:
    parts = lambda o: (o.weights, o.realization, o.space)  # noqa: E731
    assert parts(create("neighbor")) == ("logits", "anchor", "input")
    assert parts(create("neighbor", variant="released")) == ("probs", "sampled", "output")
    mixed = create("neighbor", variant="released", space="input", realization="anchor")
    assert parts(mixed) == ("probs", "anchor", "input")
    assert parts(create(**mixed.spec())) == parts(mixed)


def test_greedy_combination_warns_and_no_other() -> None:
    with pytest.warns(UserWarning, match="greedy decoding"):
        create("neighbor", rate=1.0)
    with pytest.warns(UserWarning, match="sampled"):
        create("neighbor", rate=1.0, variant="released", realization="anchor")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        create("neighbor", rate=1.0, realization="sampled")
        create("neighbor", rate=1.0, variant="released")
        create("neighbor", rate=0.99)


def test_defaults_are_those_of_the_papers() -> None:
    neighbor, gumbel, gaussian = create("neighbor"), create("gumbel"), create("gaussian")
    assert (neighbor.rate, neighbor.k, neighbor.metric, neighbor.until) == (0.1, 3, "cosine", "</think>")
    assert (neighbor.mix_temperature, neighbor.skip_special) == (1.0, False)
    assert (gumbel.rate, gumbel.k, gumbel.top_p, gumbel.tau, gumbel.clamp) == (1.0, 5, 0.95, 0.1, True)
    assert (gaussian.rate, gaussian.sigma, gaussian.sigma_of, gaussian.tau) == (1.0, 0.33, "embedding", 0.5)
