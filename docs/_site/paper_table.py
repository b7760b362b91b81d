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
    authors = [each.get("family-names") or each["name"] for each in paper["authors"]]
    named = " and ".join(authors) if len(authors) < 3 and "and others" not in authors else f"{authors[0]} et al."
    where = ", ".join([*_registered(number), *_pages(number), *_published(paper)])
    return f"| [{paper['title']}]({paper['url']}) | {named}, {paper['year']} | {where} |"


def _registered(number: str) -> Iterator[str]:
    for kept, flag in FLAGS.items():
        for name in kept.in_tree():
            if number in getattr(kept.get(name), "paper", ""):
                yield f"[`{flag} {name}`](methods/{method_pages.address(kept, name)}.md)"


def _pages(number: str) -> Iterator[str]:
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if number in text:
            yield f"[{re.findall('^# (.+)', text)[0]}]({page.name})"


def _published(paper: dict) -> Iterator[str]:
    for each in paper["identifiers"]:
        if each["type"] == "url":
            yield f"[{each['description']}]({each['value']})"
