# SPDX-License-Identifier: Apache-2.0
"""The pages use one word for one thing: that of the glossary in docs/methods.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "studies").glob("*.md"))]
# A term of the glossary, and words that would say the same.
OTHERS = {
    "perturbation": r"perturbation operators?|disturbances?",
    "method": r"techniques?",
    "strategy": r"treatments?|contenders?",
    "gate": r"gatings?|gaters?",
    "edit": r"input edits|interventions?",
    "anchor": r"anchor tokens?|pivots?",
    "response": r"completions?|generations",
    "trajectory": r"traces? of (?:the )?response",
    "record": r"recordings|replay logs?|replay records?",
    "replay": r"playbacks?|re-?play(?:ing)? back",
    "gap": r"discrepanc(?:y|ies)|log-prob(?:ability)? mismatch(?:es)?",
}


def glossary() -> dict[str, str]:
    """Each term with what it means."""
    text = (DOCS / "methods.md").read_text(encoding="utf-8").partition("\n## Glossary\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| \*\*(.+?)\*\* \| (.+) \|$", text, re.MULTILINE))


def prose(page: Path) -> str:
    """A page without code, addresses, and the glossary itself."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"\n## Glossary\n.*?(?=\n## )", "", text, flags=re.DOTALL)
    return re.sub(r"```.*?```|`[^`\n]+`|\]\([^)]*\)", " ", text, flags=re.DOTALL)


def test_the_glossary_has_each_term_once_in_a_dozen_lines() -> None:
    terms = glossary()
    assert set(terms) == set(OTHERS) and len(terms) <= 12
    assert all(20 < len(meaning) < 200 for meaning in terms.values())


@pytest.mark.parametrize("term", OTHERS)
def test_pages_use_the_term_and_no_other(term: str) -> None:
    texts = {page.name: prose(page) for page in PAGES}
    assert sum(re.search(rf"\b{term}", text) is not None for text in texts.values()) >= 3, "a term in use"
    found = {
        name: words
        for name, text in texts.items()
        if (words := re.findall(rf"\b(?:{OTHERS[term]})\b", text, re.IGNORECASE))
    }
    assert not found, f"the glossary says {term}"
