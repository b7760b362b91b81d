# SPDX-License-Identifier: Apache-2.0
"""The table of papers: CITATION.cff, with what is registered of each paper and the pages that name it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import method_pages
import yaml

from ngrpo.config.kinds import FLAGS

ROOT = Path(__file__).resolve().parents[2]


def table() -> str:
    """The table in Markdown, a row for each reference in the order of CITATION.cff."""
    papers = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["references"]
    return "\n".join(["| paper | authors | here |", "| --- | --- | --- |", *map(_row, papers)])


def _row(paper: dict) -> str:
    number = paper["url"].rpartition("/")[2]
    names = [author.get("family-names") or author["name"] for author in paper["authors"]]
    lists_all_authors = len(names) < 3 and "and others" not in names
    authors = " and ".join(names) if lists_all_authors else f"{names[0]} et al."
    where = ", ".join([*_registered(number), *_pages(number), *_published(paper)])
    return f"| [{paper['title']}]({paper['url']}) | {authors}, {paper['year']} | {where} |"


def _registered(number: str) -> Iterator[str]:
    """Links to the pages of the methods that are of the paper."""
    for methods, flag in FLAGS.items():
        for name in methods.in_tree():
            if number in getattr(methods.get(name), "paper", ""):
                yield f"[`{flag} {name}`](methods/{method_pages.address(methods, name)}.md)"


def _pages(number: str) -> Iterator[str]:
    """Links to the pages of docs/ that have the paper's number on arXiv."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if number in text:
            yield f"[{re.findall('^# (.+)', text)[0]}]({page.name})"


def _published(paper: dict) -> Iterator[str]:
    """Links to where else the paper was published."""
    for identifier in paper["identifiers"]:
        if identifier["type"] == "url":
            yield f"[{identifier['description']}]({identifier['value']})"
