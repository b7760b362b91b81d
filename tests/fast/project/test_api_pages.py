# SPDX-License-Identifier: Apache-2.0
"""The API pages: every example runs, every object has one, every name that is public is there."""

import doctest
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import perturbations
from perturbations import registry

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
OBJECT = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
EXAMPLE = re.compile(r"^```pycon\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def session() -> Iterator[ModuleType]:
    """A module for the examples, so that the classes they make have an address; what they register is forgotten."""
    module = sys.modules["api_examples"] = ModuleType("api_examples")
    yield module
    del sys.modules["api_examples"]
    for kept in (registry.perturbations, registry.gates):
        for name in [name for name, cls in kept.registered.items() if cls.__module__ == "api_examples"]:
            del kept.registered[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_example_runs(page: Path, session: ModuleType) -> None:
    """One session for a page, from top to bottom."""
    source = "\n".join(EXAMPLE.findall(page.read_text(encoding="utf-8")))
    test = doctest.DocTestParser().get_doctest(source, {}, page.name, str(page), 0)
    test.globs = vars(session)
    assert len(test.examples) >= 10
    told: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=told.append, clear_globs=False)
    assert not failed, "".join(told)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_object_exists_and_has_a_docstring_and_an_example(page: Path) -> None:
    sections = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert len(sections) > 5
    for section in sections:
        title = section.splitlines()[0]
        objects = OBJECT.findall(section)
        assert objects, f"{title}: no object"
        assert EXAMPLE.search(section) or "Needs an engine: run by " in section, f"{title}: no example"
        for address in objects:
            module, _, name = address.rpartition(".")
            assert getattr(import_module(module), name).__doc__, address


def test_every_public_name_is_on_the_page() -> None:
    text = (ROOT / "docs" / "api" / "perturbations.md").read_text(encoding="utf-8")
    missing = [name for name in perturbations.__all__ if not re.search(rf"\b{name}\b", text)]
    assert not missing
