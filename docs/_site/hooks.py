# SPDX-License-Identifier: Apache-2.0
"""What mkdocs does while it builds the site: pages of the methods, tables from the code, links between pages.

The pages of docs/ stay readable by themselves. What is made here is made anew at each build.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).resolve().parent))

import method_pages

from ngrpo import catalogue
from ngrpo.trainer.seams import SEAMS

ROOT = Path(__file__).resolve().parents[2]
# Files of the project's root that are pages as well.
OF_THE_ROOT = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The pages of the methods join the navigation, a section for each kind."""
    sections = []
    for kept in catalogue.KINDS:
        pages = [{name: f"methods/{method_pages.address(kept, name)}.md"} for name in kept.in_tree()]
        sections.append({f"{kept.kind.capitalize()}s": pages})
    for section in config.nav or []:
        if "Methods" in section:
            section["Methods"] += sections
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages that no file holds."""
    made = method_pages.pages()
    for name, page in OF_THE_ROOT.items():
        made[page] = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
    for place, content in made.items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Tables from the code, and links where a page of docs/ is named by its path."""
    markdown = markdown.replace("<!-- seams -->", seams_table())
    if "/" not in page.file.src_uri:
        markdown = re.sub(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)", _of_the_root, markdown)
    known = {file.src_uri for file in files.documentation_pages()}
    up = "../" * page.file.src_uri.count("/")

    def linked(match: re.Match[str]) -> str:
        return f"[{match[1]}]({up}{match[1]})" if match[1] in known else match[0]

    # Not in code, and not where it is the text or the target of a link already.
    lines, fenced = [], False
    for line in markdown.split("\n"):
        fenced ^= line.lstrip().startswith("```")
        lines.append(line if fenced else re.sub(r"(?<![\w/`(\[])docs/([\w/]+\.md)(?![\w`\])])", linked, line))
    return "\n".join(lines)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings mark names as Sphinx does, :class:`Name`; the marks are no part of what is read."""
    return re.sub(r":(?:class|func|meth|mod|data|attr):(?=<code)", "", html)


def _of_the_root(match: re.Match[str]) -> str:
    """A link out of docs/: to the page that the file is, or else what it says and the file's path."""
    text, path = match[1], match[2]
    return f"[{text}]({OF_THE_ROOT[path]})" if path in OF_THE_ROOT else f"{text} (`{path}`)"


def seams_table() -> str:
    """What is replaced in OpenRLHF, or relied upon, as the table of the code has it."""
    rows = ["| upstream | ours | when | why | checked with |", "| --- | --- | --- | --- | --- |"]
    for seam in SEAMS:
        ours = f"`{seam.ours.removeprefix('ngrpo.')}`" if seam.ours else "relied upon"
        cells = (f"`{seam.target}`", ours, seam.when, seam.why, seam.checked)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """A page that asks for something from elsewhere would not open offline."""
    foreign = re.compile(r'<(?:link|script|img)\b[^>]+(?:href|src)="(https?:)?//[^"]+"')
    for page in Path(config.site_dir).rglob("*.html"):
        found = [m[0] for m in foreign.finditer(page.read_text(encoding="utf-8")) if 'rel="canonical"' not in m[0]]
        if found:
            raise RuntimeError(f"{page}: {found[0]} is not of this site")
