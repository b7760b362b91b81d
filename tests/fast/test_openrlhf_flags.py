# SPDX-License-Identifier: Apache-2.0
"""`Flags`: read as argparse reads them, and completed without touching what was given."""

import argparse

import pytest

from ngrpo.machine.upstream.openrlhf_flags import Flags

WORDS = ["stray", "--a", "1", "--b", "--c=x", "--a", "2", "0.5", "--e=", "--f", "-1", "--d"]


@pytest.mark.parametrize(
    "words", [["--a", "1", "--a", "2"], ["--a=1"], ["--a=--b", "--b"], ["--a", "-1"], ["--b"], ["--a=x=y"], ["--a="]]
)
def test_values_are_those_of_argparse(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--a")
    parser.add_argument("--b", action="store_const", const="")
    given = parser.parse_args(words)
    assert (Flags(words).value("--a"), Flags(words).value("--b")) == (given.a, given.b)


def test_flag_by_flag_is_every_word() -> None:
    flags = list(Flags(WORDS))
    assert [word for flag in flags for word in flag.argv] == WORDS
    assert [flag.name for flag in flags] == ["", "--a", "--b", "--c", "--a", "--e", "--f", "--d"]
    assert flags[4].values == ("2", "0.5")
    assert flags[3].values == ("x",)
    assert flags[2].values == ()


def test_defaults_are_added_only_where_absent_and_told() -> None:
    given = Flags(["--a=1", "--switch"])
    flags = given.with_defaults({"--a": "2", "--switch": None, "--b": "x y", "--other": None, "--c": ("0", "1")})
    assert flags.added == ("--b", "x y", "--other", "--c", "0", "1")
    assert flags.argv == [*flags.added, *given.given] and given.added == ()
    assert flags.with_defaults({"--b": "z", "--d": "4"}).added == (*flags.added, "--d", "4"), "an addition stays"


def test_replaced_in_both_spellings_and_in_what_was_added() -> None:
    flags = Flags(["--x.name", "a", "--y.name=b", "--x", "a", "--z.name"]).with_defaults({"--w.name": "c"})
    replaced = flags.replaced("name", str.upper)
    assert replaced.argv == ["--w.name", "C", "--x.name", "A", "--y.name=B", "--x", "a", "--z.name"]
    assert replaced.added == ["--w.name", "C"]
