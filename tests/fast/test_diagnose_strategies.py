"""`ngrpo.strategies`: the flags that name what is compared."""

from __future__ import annotations

import pytest

from ngrpo.strategies import parse_strategies
from perturbations import create


def ids(*args: object) -> list[str]:
    return [strategy.id for strategy in parse_strategies(*args)]  # type: ignore[arg-type]


def test_names_and_their_specs() -> None:
    plain, neighbor = parse_strategies("none,neighbor")
    assert (plain.id, plain.spec, plain.settings) == ("none", None, {})
    assert (neighbor.id, neighbor.spec) == ("neighbor", create("neighbor").spec())
    assert "2606.10768" in neighbor.paper


def test_options_after_colons_and_blanks() -> None:
    (strategy,) = parse_strategies("neighbor:rate=0.2:variant=released")
    assert strategy.id == "neighbor rate=0.2 variant=released"
    assert strategy.spec == create("neighbor", rate=0.2, variant="released").spec()
    assert strategy.settings == {"perturbation.rate": "0.2", "perturbation.variant": "released"}
    assert parse_strategies(None, (), ["neighbor rate=0.2 variant=released"]) == [strategy]
    assert parse_strategies("neighbor rate=0.2 variant=released") == [strategy]


def test_an_operator_of_another_package_keeps_its_colon() -> None:
    (strategy,) = parse_strategies("perturbations.strategies.gaussian:Gaussian:sigma=0.5")
    assert strategy.spec is not None and strategy.spec["sigma"] == 0.5


def test_a_sweep_applies_where_it_can() -> None:
    assert ids("none,neighbor,gaussian", ["perturbation.rate=0.1,0.2"]) == [
        "none",
        "neighbor rate=0.1",
        "neighbor rate=0.2",
        "gaussian rate=0.1",
        "gaussian rate=0.2",
    ]
    assert ids("neighbor:rate=0.5,gaussian", ["perturbation.sigma=1", "perturbation.rate=0.1"]) == [
        "neighbor rate=0.5",
        "gaussian sigma=1 rate=0.1",
    ]


def test_sweeps_are_combined() -> None:
    swept = ids("neighbor", ["perturbation.metric=cosine,l2", "perturbation.k=2,3"], ["none"])
    assert swept == [f"neighbor metric={m} k={k}" for m in ("cosine", "l2") for k in (2, 3)] + ["none"]


def test_the_same_twice_and_rate_zero() -> None:
    strategies = parse_strategies("none,none,neighbor:rate=0")
    assert [s.id for s in strategies] == ["none", "none (2)", "neighbor rate=0"]
    assert [s.spec for s in strategies] == [None, None, None]


def test_notes_are_the_operators_warnings() -> None:
    (strategy,) = parse_strategies(None, (), ["neighbor rate=1"])
    assert "greedy decoding" in strategy.notes[0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nieghbor",), "Did you mean 'neighbor'"),
        (("none,",), "a name is missing"),
        ((None,), "no strategy is given"),
        (("neighbor:rate=2",), r"must be in \[0, 1\]"),
        (("neighbor:raet=0.2",), "Did you mean 'rate'"),
        (("neighbor:sigma=1",), "belongs to perturbation gaussian"),
        (("neighbor:rate=0.1:rate=0.2",), "given twice"),
        (("neighbor:rate=0.1:k",), "must be option=value"),
        (("neighbor", ["perturbation.metrc=l1"]), "Did you mean 'metric'"),
        (("neighbor", ["rate=0.1"]), "must be perturbation.OPTION=VALUE"),
        (("neighbor", ["perturbation.rate=0.1,"]), "must be perturbation.OPTION=VALUE"),
        (("neighbor", ["perturbation.rate=0.1", "perturbation.rate=0.2"]), "given twice"),
        (("none", ["perturbation.rate=0.1"]), "allows only one"),
        ((None, ["perturbation.rate=0.1"], ["neighbor"]), "sweeps apply to --perturbations"),
        ((None, (), [""]), "a name is needed"),
        ((None, (), ["neighbor 'rate=0.1"]), "No closing quotation"),
    ],
)
def test_errors_say_what_to_do(args: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_strategies(*args)  # type: ignore[arg-type]
