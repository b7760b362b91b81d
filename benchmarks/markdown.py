# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown, and the places of pages that scripts write."""

from collections.abc import Iterable, Sequence
from pathlib import Path


def table_lines(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    rows = [head, ["---"] * len(head), *body]
    return [f"| {' | '.join(row)} |" for row in rows]


def between(page: Path, begin: str, end: str) -> str:
    """The text of a page between two marks."""
    return page.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Puts a text between two marks of a page, on lines of its own."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
