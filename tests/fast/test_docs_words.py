# SPDX-License-Identifier: Apache-2.0
"""Pages use the glossary's words in short sentences; so do help, messages, docstrings and comments."""

import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.fast.documented_prose import DOCS, PAGES, ROOT, prose, sentences, words

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
# *Answer* is what a scorer reads in a response: the pages of scorers, and these expressions elsewhere.
SCORERS = ("evaluation.md", "decisions.md", "figures.md")
READ_BY_A_SCORER = (
    r"(?:final|different|distinct|math|canonical|reference|readable) answers?|answer checking|Answer briefly"
    r"|questions? and answers?|column of answers|finds (?:the|an) answer|answer's form"
)
SCORER_CODE = ("workbench/scoring/", "workbench/tasks/", "commands/data.py", "commands/eval.py", "command_parser.py")
SCORER_CODE += ("benchmarks/",)  # graders of answers, and processes that answer
MOST_WORDS, MOST_IN_PARENTHESES, MOST_OF_ALL = 30, 8, 22_000


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def glossary() -> dict[str, str]:
    """Each term with what it means."""
    text = (DOCS / "methods.md").read_text(encoding="utf-8").partition("\n## Glossary\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| \*\*(.+?)\*\* \| (.+) \|$", text, re.MULTILINE))


def without_glossary(page: Path) -> str:
    return (
        prose(page).partition("\n## Glossary\n")[0] + prose(page).partition("\n## Glossary\n")[2].partition("\n## ")[2]
    )


def test_the_glossary_has_each_term_once_in_a_dozen_lines() -> None:
    terms = glossary()
    assert set(terms) == set(OTHERS) and len(terms) <= 12
    assert all(20 < len(meaning) < 200 for meaning in terms.values())


@pytest.mark.parametrize("term", OTHERS)
def test_pages_use_the_term_and_no_other(term: str) -> None:
    texts = {name_of(page): without_glossary(page) for page in PAGES}
    assert sum(re.search(rf"\b{term}", text) is not None for text in texts.values()) >= 3, "a term in use"
    found = {
        name: words
        for name, text in texts.items()
        if (words := re.findall(rf"\b(?:{OTHERS[term]})\b", text, re.IGNORECASE))
    }
    assert not found, f"the glossary says {term}"


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


def test_a_policy_writes_responses() -> None:
    pages = [page for page in PAGES if page.name not in SCORERS]
    texts = {name_of(page): re.sub(READ_BY_A_SCORER, "", without_glossary(page), flags=re.IGNORECASE) for page in pages}
    found = {name: re.findall(r".*\banswers?\b.*", text, re.IGNORECASE) for name, text in texts.items()}
    assert not {name: lines for name, lines in found.items() if lines}, "response"


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
    found = [
        f"{name_of(path)}: {line.strip()}"
        for path in FILES
        for line in written(path).splitlines()
        if re.search(rf"\b(?:{HARD})\b", line, re.IGNORECASE)
    ]
    assert not found


def test_messages_call_a_response_so() -> None:
    found = [
        f"{name_of(path)}: {line.strip()}"
        for path in FILES
        if not any(part in name_of(path) for part in SCORER_CODE)
        for line in re.sub(READ_BY_A_SCORER, "", written(path), flags=re.IGNORECASE).splitlines()
        if re.search(r"\banswer(?:s|ed)?\b", line, re.IGNORECASE)
    ]
    assert not found, "response"


def test_the_pages_are_read_in_two_hours() -> None:
    """README and docs, without code blocks and generated tables."""
    pages = [page for page in PAGES if page.name == "README.md" or page.is_relative_to(DOCS)]
    counts = {name_of(page): words(prose(page, code=r"\1")) for page in pages}
    assert sum(counts.values()) <= MOST_OF_ALL, counts
