# SPDX-License-Identifier: Apache-2.0
"""Pages use the glossary's terms, and no other words for the same things."""

import re
from pathlib import Path

import pytest

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
# A term of the glossary, and words that would say the same.
OTHERS = {
    "perturbation": r"perturbation operators?|disturbances?",
    "method": r"techniques?",
    "arm": r"treatments?|contenders?",
    "gate": r"gatings?|gaters?",
    "edit": r"input edits|interventions?",
    "anchor": r"anchor tokens?|pivots?",
    "response": r"completions?|generations",
    "trajectory": r"traces? of (?:the )?response",
    "record": r"recordings|replay logs?|replay records?",
    "replay": r"playbacks?|re-?play(?:ing)? back",
    "mismatch": r"discrepanc(?:y|ies)|log-prob(?:ability)? mismatch(?:es)?",
}


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


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def lines_with(words: str, texts: dict[str, str]) -> list[str]:
    """The lines of texts, by name, that have one of these words."""
    found = re.compile(rf".*\b(?:{words})\b.*", re.IGNORECASE)
    return [f"{name}: {line}" for name, text in texts.items() for line in found.findall(text)]


def glossary() -> dict[str, str]:
    """Each term with what it means."""
    text = (DOCS / "glossary.md").read_text(encoding="utf-8").partition("\n## Glossary\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| \*\*(.+?)\*\* \| (.+) \|$", text, re.MULTILINE))


def test_the_glossary_has_each_term_once_in_a_dozen_lines() -> None:
    terms = glossary()
    assert set(terms) == set(OTHERS)
    assert len(terms) <= 12
    assert all(20 < len(meaning) < 200 for meaning in terms.values())


@pytest.mark.parametrize("term", OTHERS)
def test_pages_use_the_term_and_no_other(term: str) -> None:
    texts = {name_of(page): re.sub(r"(?s)\n## Glossary\n.*?(\n## |$)", "", prose(page)) for page in PAGES}
    assert sum(re.search(rf"\b{term}", text) is not None for text in texts.values()) >= 3, "a term in use"
    assert not lines_with(OTHERS[term], texts), f"the glossary says {term}"
