# SPDX-License-Identifier: Apache-2.0
"""The commands that README, docs and examples show, one by one."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))
PAGES += sorted((ROOT / "examples").rglob("README.md"))
_FENCED = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHELL = ("bash", "sh", "shell", "console")
# A script's own comment and a Python file's docstring show how it is called.
_CALLED = re.compile(r"^#?\s*((?:bash examples/|ngrpo |python -m |\w+=\S+ (?:bash|ngrpo) ).*)$", re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """A command as it is shown.

    Attributes:
        page: the file, from the project's root.
        line: the command in one line, without its comment.
    """

    page: str
    line: str

    @property
    def words(self) -> list[str]:
        """As a shell splits them, without what says "and so on"."""
        return [word for word in shlex.split(self.line) if word not in ("...", "…")]

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """The fenced blocks of a page in these languages."""
    for match in _FENCED.finditer(page.read_text(encoding="utf-8")):
        if match["language"] in languages:
            yield re.sub(rf"^{match['indent']}", "", match["body"], flags=re.MULTILINE)


def commands() -> list[Command]:
    """All that stand in a fenced block for a shell, and in the heads of the files of examples/."""
    shown = [(page, block) for page in PAGES for block in blocks(page, *SHELL)]
    for file in sorted((ROOT / "examples").iterdir()):
        if file.suffix in (".sh", ".py"):
            text = file.read_text(encoding="utf-8").replace("\\\n", " ")
            head = ast.get_docstring(ast.parse(text)) or "" if file.suffix == ".py" else text.split("set -euo")[0]
            shown += [(file, line) for line in _CALLED.findall(head)]
    return [Command(str(page.relative_to(ROOT)), line) for page, text in shown for line in _lines(text)]


def _lines(text: str) -> Iterator[str]:
    values: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        bare = re.sub(r"\s+#\s.*$", "", line).strip()
        loop = re.fullmatch(r"for (\w+) in (\S+).*; do", bare)
        if loop:  # its body stands for all of them, with the first
            values[loop[1]] = loop[2]
        if loop or bare == "done":
            continue
        bare = re.sub(r"\$(\w+)", lambda match: values.get(match[1], match[0]), bare)
        if bare and not bare.startswith("#"):
            # [WORDS] of a usage line are what may be left out.
            yield re.sub(r"\s+", " ", re.sub(r"\s\[[^\]]*\.\.\.\]|\s\[[A-Z_]+\]", "", bare))
