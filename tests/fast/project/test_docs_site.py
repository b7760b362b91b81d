# SPDX-License-Identifier: Apache-2.0
"""The documentation site: the pages generated from the code, links, named files; built where mkdocs is."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ngrpo.commands import method_texts
from ngrpo.config.kinds import FLAGS
from perturbations import registry

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_site"))

import method_pages  # noqa: E402

METHODS = [(kept, name) for kept in FLAGS for name in kept.in_tree()]


@pytest.mark.parametrize(("kept", "name"), METHODS, ids=lambda each: getattr(each, "kind", each))
def test_every_method_has_a_page_that_says_what_it_does(kept: Any, name: str) -> None:
    page = method_pages.page(kept, name)
    heads = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert page.startswith(f"# `{name}`\n\n")
    assert "Options" in heads
    assert f"`{FLAGS[kept]} {name}`" in page
    assert ":class:" not in page
    assert "``" not in page.replace("```", "")
    for field in method_texts.own_options(kept, kept.get(name)):
        assert f"`{FLAGS[kept]}.{field.name}`" in page
    if kept.kind in method_pages.FORMULAS:
        assert set(heads) & set(method_pages.FORMULAS[kept.kind].values()), "a docstring with its formula"
    if kept.kind not in ("gate", "replay buffer"):
        assert "Defaults and differences" in heads, f"an entry on one of {method_pages.TABLES}"
    if kept is registry.perturbations and name != "none":
        assert "When to use it" in heads and "What it changes and costs" in heads, "rows of docs/methods.md"
        assert "https://arxiv.org/abs/" in page


def test_the_readme_names_every_perturbation() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in registry.perturbations.in_tree())


def test_every_page_is_listed() -> None:
    """In llms.txt, and in the navigation or in a page that is in it."""
    listed = set(re.findall(r"\]\(docs/([\w/]+\.md)", (ROOT / "llms.txt").read_text(encoding="utf-8")))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert listed == pages
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    reached = set(re.findall(r"([\w/]+\.md)", navigation))
    for name in list(reached & pages):
        text = (DOCS / name).read_text(encoding="utf-8")
        links = re.findall(r"\]\((?!https?:|#)([\w/.]+\.md)", text)
        reached |= {os.path.normpath(os.path.join(os.path.dirname(name), link)) for link in links}
    assert not pages - reached, "add the page to nav in mkdocs.yml"


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        found.add(re.sub(r"[^\w\- ]", "", shown.lower()).strip().replace(" ", "-"))
    return found


def test_anchors_of_links_exist() -> None:
    """So that a removed heading is seen without mkdocs."""
    outside = [ROOT / name for name in ("README.md", "llms.txt", "CONTRIBUTING.md", "CHANGELOG.md")]
    recipes = ROOT / "examples" / "recipes" / "README.md"
    for page in [*outside, recipes, *DOCS.rglob("*.md")]:
        assert_anchors_exist(page, page.read_text(encoding="utf-8"))


def test_anchors_of_links_on_methods_pages_exist() -> None:
    """These pages are made from rows and entries of other pages, whose links to their own headings must follow."""
    for address, text in method_pages.pages().items():
        assert "](#" not in text, f"{address}: a link to a heading of the page that the text is from"
        assert_anchors_exist(DOCS / address, text)


def assert_anchors_exist(page: Path, text: str) -> None:
    """``text``: what the page has, which need not be a file."""
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", text):
        target = (page.parent / link).resolve() if link else page
        if target.suffix == ".md":
            assert target.is_file(), f"{page.relative_to(ROOT)}: {link}"
            assert anchor in anchors_of(target), f"{page.relative_to(ROOT)}: {link}#{anchor}"


# Words of the glossary that a newcomer cannot guess.
TERMS = r"\b(?:edits?|anchors?|trajector(?:y|ies)|records?|replays?|mismatch(?:es)?|arms?)\b"


def test_pages_with_terms_link_the_glossary() -> None:
    """Studies and what scripts write are for those who come from a page that does."""
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if page.name in ("glossary.md", "compatibility.md", "cli.md"):
            continue
        if len(set(re.findall(TERMS, text))) > 1:
            assert "(glossary.md" in text, f"{page.name} uses words of the glossary"


def test_a_method_is_tabulated_once() -> None:
    """One entry for each on all pages, so that no two can disagree."""
    heads = [name for head, _ in method_pages.entries() for name in re.findall(r"`(\w+)`", head)]
    assert sorted(heads) == sorted(name for kept, name in METHODS if kept.kind not in ("gate", "replay buffer"))


def test_links_between_pages_lead_somewhere() -> None:
    """By file; anchors have a test of their own."""
    for page in [ROOT / "README.md", ROOT / "llms.txt", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}"


def test_the_command_line_page_is_the_help() -> None:
    """By a process of its own: the help has all names that are registered, and other tests register some."""
    command = [sys.executable, DOCS / "_site" / "cli_page.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    written = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert written == printed, "PYTHONPATH=. python docs/_site/cli_page.py > docs/cli.md"


def test_files_that_pages_name_exist() -> None:
    for page in (ROOT / "CONTRIBUTING.md", DOCS / "architecture.md"):
        for name in re.findall(r"`((?:perturbations|ngrpo|tests|benchmarks)/[\w/]+\.py)`", page.read_text("utf-8")):
            assert (ROOT / name).is_file(), f"{page.relative_to(ROOT)}: {name}"


@pytest.mark.skipif(not all(map(find_spec, ("mkdocs", "material", "mkdocstrings"))), reason="needs the extra docs")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    # Not --quiet: with it, mkdocs counts no warnings, and --strict has none to fail on.
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for kept, name in METHODS:
        assert (tmp_path / "methods" / f"{method_pages.address(kept, name)}.html").is_file()
    architecture = (tmp_path / "architecture.html").read_text(encoding="utf-8")
    assert "ActorPPOTrainer.broadcast_to_vllm" in architecture, "the table of patches"
    api = (tmp_path / "api" / "perturbations.html").read_text(encoding="utf-8")
    assert 'id="perturbations.base.Perturbation.propose"' in api
    assert ":class:" not in api
