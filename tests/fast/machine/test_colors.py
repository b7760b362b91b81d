# SPDX-License-Identifier: Apache-2.0
"""Colour where the stream is a terminal, unless NO_COLOR or TERM=dumb says otherwise."""

import io

import pytest

from ngrpo.machine.colors import colored, has_color, state_column


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_a_terminal_has_colour_and_a_file_has_none() -> None:
    assert colored("WRONG", "red", Terminal()) == "\x1b[31mWRONG\x1b[0m"
    assert colored("WRONG", "red", io.StringIO()) == "WRONG"


@pytest.mark.parametrize(
    ("name", "value", "has"), [("NO_COLOR", "1", False), ("NO_COLOR", "", True), ("TERM", "dumb", False)]
)
def test_the_environment_turns_it_off(name: str, value: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://no-color.org: an empty NO_COLOR counts as absent."""
    monkeypatch.setenv(name, value)
    assert has_color(Terminal()) is has


def test_a_state_fills_its_column_with_and_without_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert state_column("ok", 7) == "ok     "
    monkeypatch.setattr("sys.stdout", Terminal())
    assert state_column("ok", 7) == "\x1b[32mok\x1b[0m     "
