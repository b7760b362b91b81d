# SPDX-License-Identifier: Apache-2.0
"""The pages as sentences: without code, addresses, and the tables that a script writes."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

DOCS = ROOT / "docs"
HOME = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "llms.txt")]
PAGES = [
    *HOME,
    ROOT / "examples" / "recipes" / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if "tables" not in page.parts),  # those that studies' scripts write
]
# A table behind such a line is written by the script that it names, or holds what one printed.
GENERATED = re.compile(r"^<!-- (?:matrix|table)\b.*?-->\n(?:(?![|#]).*\n)*?(?:\|.*\n?)+", re.MULTILINE)


def prose(page: Path, code: str = "CODE") -> str:
    """A page's text with its own tables; ``code`` replaces a span of code, of which group 1 is the text."""
    text = page.read_text(encoding="utf-8")
    if page.name == "compatibility.md":  # `python -m ngrpo.config.compatibility` writes it
        return re.sub(r"^\|.*\n", "", text, flags=re.MULTILINE)
    if page.name == "models.md":  # as `python -m benchmarks.models` writes it from there on
        text = text.partition("<!-- models")[0]
    text = re.sub(r"^ *```.*?^ *```$", "", GENERATED.sub("", text), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^::: .*(?:\n    .*)*", "", text, flags=re.MULTILINE)  # docstrings on the site
    text = re.sub(r"`([^`\n]+)`", code, re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> Iterator[str]:
    """Sentences of paragraphs, items and headings; the cells of a table one by one."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*>|#]|\d+\.))", text):
        if block.startswith("    ") or re.fullmatch(r"[|\s:-]*", block):  # a formula, or a table's rule
            continue
        for part in re.split(r"(?<!\\)\|", block) if block.lstrip().startswith("|") else [block]:
            line = re.sub(r"^\s*(?:[-*>#]+|\d+\.)\s+", "", part)
            yield from filter(None, re.split(r"(?<=[.!?])(?<!et al\.)[*\"”)]*\s+", " ".join(line.split())))


def words(text: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in text.split())
