# SPDX-License-Identifier: Apache-2.0
"""Commands with a closed stream, an output that has ASCII alone, and a Python that drops docstrings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ngrpo import cli
from ngrpo.commands import method_texts
from tests.conftest import ROOT

HELP = [[], ["help"], *([name, "--help"] for name in cli.COMMANDS), ["list", "neighbor"], ["list"]]
PROGRAM = "from ngrpo import cli\nfor words in {words}:\n    print(cli.main(words))\n"


def ran(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A shell's command, in which ``ngrpo`` is this tree's."""
    program = f'ngrpo() {{ "{sys.executable}" -m ngrpo.cli "$@"; }}\n{command}'
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(["bash", "-c", program], capture_output=True, text=True, env=variables, encoding="utf-8")


@pytest.mark.more
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("words", "code"), [("--version", 0), ("list neighbor", 0), ("list no_such_name", 2)])
def test_a_closed_stream(words: str, code: int, closed: str) -> None:
    result = ran(f"ngrpo {words} {closed}")
    assert result.returncode == code and "Traceback" not in result.stderr, result.stderr


@pytest.mark.more
def test_a_file_does_not_get_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    program = "import os\nfrom ngrpo.machine import console\nconsole.open_streams()\n"
    program += f"file = open({str(tmp_path / 'a')!r}, 'w')\nos.system('echo printed; echo printed >&2')\nprint(1)\n"
    (tmp_path / "p.py").write_text(program)
    assert ran(f'"{sys.executable}" {tmp_path / "p.py"} >&- 2>&-').returncode == 0
    assert (tmp_path / "a").read_text() == ""


@pytest.mark.more
def test_an_output_that_has_ascii_alone() -> None:
    shown = method_texts.described("gumbel")
    assert not shown.isascii(), "the case"
    result = ran("ngrpo list gumbel", PYTHONIOENCODING="ascii")
    assert result.returncode == 0
    assert not result.stderr
    assert result.stdout == "".join(letter if letter.isascii() else "?" for letter in shown) + "\n"


@pytest.mark.more
def test_help_without_docstrings() -> None:
    """Both in processes of their own: another test may have registered extensions in this one."""
    command = f'"{sys.executable}" -c "{PROGRAM.format(words=HELP)}"'
    expected = ran(command, COLUMNS="80").stdout
    result = ran(command, PYTHONOPTIMIZE="2", COLUMNS="80")
    assert len(expected) > 10_000
    assert result.stdout == expected, result.stderr
