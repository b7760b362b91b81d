# SPDX-License-Identifier: Apache-2.0
"""Pages use the glossary's words in short sentences; so do help, messages, docstrings and comments."""

import io
import re
import tokenize
from collections.abc import Iterator
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
# What is hard to follow, or says less than the verb and the noun for it.
HARD = (
    r"stands?(?!-in)|stood|likewise|anew|wholly|so many|goes on|so far|has not|by itself|besides?|whose|told of"
    r"|asked for|at hand|in place|comes with|made of|refused unless|nothing but|all that|those that|proves?|so-called"
    r"|gone round"
)
MOST_WORDS, MOST_IN_PARENTHESES, MOST_OF_ALL = 30, 8, 25_000


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


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def lines_with(words: str, texts: dict[str, str]) -> list[str]:
    """The lines of texts, by name, that have one of these words."""
    found = re.compile(rf".*\b(?:{words})\b.*", re.IGNORECASE)
    return [f"{name}: {line}" for name, text in texts.items() for line in found.findall(text)]


def glossary() -> dict[str, str]:
    """Each term with what it means."""
    text = (DOCS / "methods.md").read_text(encoding="utf-8").partition("\n## Glossary\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| \*\*(.+?)\*\* \| (.+) \|$", text, re.MULTILINE))


def test_the_glossary_has_each_term_once_in_a_dozen_lines() -> None:
    terms = glossary()
    assert set(terms) == set(OTHERS) and len(terms) <= 12
    assert all(20 < len(meaning) < 200 for meaning in terms.values())


@pytest.mark.parametrize("term", OTHERS)
def test_pages_use_the_term_and_no_other(term: str) -> None:
    texts = {name_of(page): re.sub(r"(?s)\n## Glossary\n.*?(\n## |$)", "", prose(page)) for page in PAGES}
    assert sum(re.search(rf"\b{term}", text) is not None for text in texts.values()) >= 3, "a term in use"
    assert not lines_with(OTHERS[term], texts), f"the glossary says {term}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_sentences_are_short_and_plain(page: Path) -> None:
    found = []
    for sentence in sentences(prose(page)):
        inner = [words(each) for each in re.findall(r"\(([^()]*)\)", sentence)]
        checks = {
            f"more than {MOST_WORDS} words": words(sentence) > MOST_WORDS,
            "more than one parenthesis": len(inner) > 1,
            f"a parenthesis of more than {MOST_IN_PARENTHESES} words": max(inner, default=0) > MOST_IN_PARENTHESES,
            "a word that the project leaves out": re.search(rf"\b(?:{HARD})\b", sentence, re.IGNORECASE),
        }
        found += [f"{why}: {sentence}" for why, wrong in checks.items() if wrong]
    assert not found


FOLDERS = {"perturbations": "*.py", "ngrpo": "*.py", "ngrpo/commands/templates": "*.txt", "benchmarks": "*.py"}
FOLDERS |= {"examples": "*.[pys]*", "ngrpo/workbench/report/templates": "*.html"}
FILES = [path for folder, names in FOLDERS.items() for path in sorted((ROOT / folder).rglob(names)) if path.is_file()]


def written(path: Path) -> str:
    """Docstrings, comments and messages of a file; of a string its text alone, without code and placeholders."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        text = "\n".join(each.string for each in tokens if each.type in (tokenize.STRING, tokenize.COMMENT))
    # Arguments have names; torch's operations change a tensor "in place".
    code = r"``[^`]*``|`[^`]*`|\{[^{}]*\}|\['\w+'\]|^ *\w+: |^[rf]*\"\S*\"$|<[^<>]*>|in place"
    return re.sub(code, "", text, flags=re.MULTILINE)


def test_messages_and_docstrings_are_plain_too() -> None:
    assert len(FILES) > 250
    assert not lines_with(HARD, {name_of(path): written(path) for path in FILES})


def test_the_pages_are_read_in_two_hours() -> None:
    """README and docs, without code blocks and generated tables."""
    pages = [page for page in PAGES if page.name == "README.md" or page.is_relative_to(DOCS)]
    counts = {name_of(page): words(prose(page, code=r"\1")) for page in pages}
    assert sum(counts.values()) <= MOST_OF_ALL, counts
