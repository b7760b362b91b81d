# SPDX-License-Identifier: Apache-2.0
"""The port of a model's processes lies where no outgoing connection is given one."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ngrpo.machine.hardware import ports


class Actor:
    """As OpenRLHF's: a static method, called of an instance."""

    @staticmethod
    def _get_free_port() -> int:
        return -1


@pytest.fixture
def outgoing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(ports, "_OUTGOING", file)
    monkeypatch.setattr(Actor, "_get_free_port", ports.outside_of_outgoing(Actor._get_free_port))
    return file


def test_ports_below_those_of_outgoing_connections(outgoing: Path) -> None:
    outgoing.write_text("20100\t60999\n")
    found = {Actor()._get_free_port() for _ in range(50)}
    assert len(found) > 10 and all(20000 <= port < 20100 for port in found)


def test_a_port_in_use_is_not_chosen(outgoing: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outgoing.write_text(f"{port + 1} 60999")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ports, "_LOWEST", port)
            assert Actor()._get_free_port() == -1  # the only candidate is taken


@pytest.mark.parametrize("text", [None, "1024 65535", "20000 60999", "", "?"])
def test_without_room_the_system_chooses(outgoing: Path, text: str | None) -> None:
    if text is not None:
        outgoing.write_text(text)
    assert Actor()._get_free_port() == -1
