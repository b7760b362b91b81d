# SPDX-License-Identifier: Apache-2.0
"""What mkdocs does while it builds the site: pages of the methods, tables from the code, links between pages.

The pages of docs/ stay readable without it. Each build makes the rest.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).resolve().parent))

import method_pages
import paper_table

from ngrpo.config.kinds import FLAGS
from ngrpo.patches import OPENRLHF, VERL, VLLM

ROOT = Path(__file__).resolve().parents[2]
# Files outside of docs/ that are pages as well.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/recipes/README.md": "recipes.md",
}
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages that no file holds."""
    content_by_place = method_pages.pages()
    for name, place in OUTSIDE.items():
        content_by_place[place] = with_links((ROOT / name).read_text(encoding="utf-8"), ROOT / name)
    for place, content in content_by_place.items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Tables from the code, and links where a page of docs/ is named by its path."""
    markdown = markdown.replace("<!-- patches -->", patches_table())
    if page.file.abs_src_path is not None:
        markdown = with_links(markdown, Path(page.file.abs_src_path))
    if page.file.src_uri in method_pages.TABLES:
        markdown = re.sub(r"^(?:\| .*? \||- \*\*.*?\*\*)", _to_methods, markdown, flags=re.MULTILINE)
    markdown = markdown.replace("<!-- papers -->", paper_table.table())
    pages = {file.src_uri for file in files.documentation_pages()}
    up = "../" * page.file.src_uri.count("/")

    def linked(match: re.Match[str]) -> str:
        return f"[{match[1]}]({up}{match[1]})" if match[1] in pages else match[0]

    # A path becomes a link outside of code, and where it is neither the text nor the target of a link already.
    lines = []
    is_code = False
    for line in markdown.split("\n"):
        is_code ^= line.lstrip().startswith("```")
        if not is_code:
            line = re.sub(r"(?<![\w/`(\[])docs/([\w/]+\.md)(?![\w`\])])", linked, line)
        lines.append(line)
    return "\n".join(lines)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings mark names as Sphinx does, :class:`Name`; the marks are no part of what is read."""
    return re.sub(r":(?:class|func|meth|mod|data|attr):(?=<code)", "", html)


def with_links(text: str, file: Path) -> str:
    """A file's text with its links as the site has them.

    A link to a file that is no page of the site becomes plain text, followed by the file's path unless the text names
    the file already.
    """
    docs = ROOT / "docs"
    folder = file.parent if file.is_relative_to(docs) else docs

    def link(match: re.Match[str]) -> str:
        text = match[1]
        path = (file.parent / match[2]).resolve()
        anchor = match[3] or ""
        if not path.is_relative_to(ROOT):
            return match[0]
        path_in_repository = str(path.relative_to(ROOT))
        place = path
        if path_in_repository in OUTSIDE:
            place = docs / OUTSIDE[path_in_repository]
        if place.is_relative_to(docs):
            return f"[{text}]({os.path.relpath(place, folder)}{anchor})"
        names_the_file = path.name.startswith(text.strip("`"))
        return text if names_the_file else f"{text} (`{path_in_repository}`)"

    return _LINK.sub(link, text)


def _to_methods(cell: re.Match[str]) -> str:
    """The names of methods in a row's first cell, or at the head of an entry, lead to their pages."""
    pages = {name: method_pages.address(methods, name) for methods in FLAGS for name in methods.in_tree()}

    def link(match: re.Match[str]) -> str:
        return f"[{match[0]}](methods/{pages[match[1]]}.md)" if match[1] in pages else match[0]

    return re.sub(r"`(?:--\w+ )?(\w+)`", link, cell[0])


def patches_table() -> str:
    """The upstream patches, as the table of the code has them."""
    rows = ["| upstream | ours | when | why | checked with |", "| --- | --- | --- | --- | --- |"]
    for row in (*OPENRLHF, *VLLM, *VERL):
        ours = f"`{row.ours.removeprefix('ngrpo.')}`" if row.ours else "relied upon"
        cells = (f"`{row.module}`<br>`{row.attribute}`", ours, row.when, row.why, row.checked)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """A page that asks for something from elsewhere would not open offline."""
    foreign = re.compile(r'<(?:link|script|img)\b[^>]+(?:href|src)="(https?:)?//[^"]+"')
    for page in Path(config.site_dir).rglob("*.html"):
        for match in foreign.finditer(page.read_text(encoding="utf-8")):
            if 'rel="canonical"' not in match[0]:
                raise RuntimeError(f"{page}: {match[0]} is not of this site")
