# SPDX-License-Identifier: Apache-2.0
"""A written report as its elements, text and drawings, for tests that need no browser."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ngrpo.workbench.report import write_report

VOID = {"meta", "link", "br", "input", "img", "hr"}


class Page(HTMLParser):
    """Checks that elements close in order; keeps attributes, text and SVG numbers."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.parts: list[str] = []
        self.prose = ""
        self.feed(text)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.parts.append(data)
            self.prose += "" if "pre" in self.open else f" {data}"

    @property
    def words(self) -> str:
        """Text with a space between elements."""
        return " ".join(" ".join(self.parts).split())

    @property
    def text(self) -> str:
        return " ".join("".join(self.parts).replace("\u00a0", " ").split())

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for tag, attrs in self.tags if tag == name]


def written(tmp_path: Path, data: dict[str, Any]) -> tuple[str, Page]:
    path = tmp_path / "report.html"
    write_report(data, path)
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


def check_numbers(page: Page) -> None:
    """No NaN or infinity anywhere in a drawing, and each drawing has a name for those who do not see it."""
    for tag, attrs in page.tags:
        for key in ("d", "x", "y", "cx", "cy", "transform", "viewbox"):
            assert not re.search("nan|inf|None", attrs.get(key) or ""), (tag, attrs)
        if tag == "svg":
            assert attrs.get("aria-hidden") or attrs.get("aria-label") or attrs.get("aria-labelledby"), attrs
    for attrs in page.all("div"):
        if attrs.get("data-chart"):
            # parse_constant is only called for NaN and Infinity.
            json.loads(attrs["data-chart"] or "", parse_constant=lambda word: pytest.fail(word))
