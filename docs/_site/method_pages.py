# SPDX-License-Identifier: Apache-2.0
"""A page for each registered method: from its class, from the tables and entries of :data:`TABLES`, from recipes.

Nothing about a method is written here, so a page cannot say anything else than the code and these tables do.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from ngrpo.commands import method_texts
from ngrpo.config.kinds import FLAGS, of_registry
from perturbations import registry
from perturbations.registry import Registry

ROOT = Path(__file__).resolve().parents[2]
# The pages of docs/ on which methods are tabulated, each method on one.
TABLES = ("methods.md", "exploration.md")
# The methods with formulas in their docstrings, by the word for the kind.
FORMULAS = {
    "perturbation": {"propose": "What is fed", "log_density": "What the loss weighs, with its density"},
    "gate": {"plan": "Where it is open", "open": "Where it is open"},
    "advantage": {"formula": "The advantage"},
    "credit": {"formula": "The advantage of a token"},
    "sampling schedule": {"factor": "The factor at a token", "factor_of_step": "The factor in a step"},
    "policy noise": {"scale": "σ in step k", "selects": "Which weights"},
}


def pages() -> dict[str, str]:
    """Markdown of every page by its place in the docs folder, perturbations first."""
    markdown_by_place = {}
    for methods in FLAGS:
        for name in methods.in_tree():
            markdown_by_place[f"methods/{address(methods, name)}.md"] = page(methods, name)
    return markdown_by_place


def address(methods: Registry, name: str) -> str:
    """The file name of a method's page, without ``.md``.

    The kind is part of it, since a perturbation and an advantage may have the same name.
    """
    return f"{methods.kind.replace(' ', '-')}-{name}"


def page(methods: Registry, name: str) -> str:
    """One method in Markdown."""
    cls = methods.get(name)
    flag = FLAGS[methods]
    paragraphs = [f"# `{name}`", plain(inspect.cleandoc(cls.__doc__ or ""))]
    paragraphs.append("\n".join(_facts(methods, name, cls, flag)))
    for method, heading in FORMULAS.get(methods.kind, {}).items():
        docstring = inspect.getdoc(vars(cls)[method]) if method in vars(cls) else None
        if docstring:
            before_sections = re.split(r"\n\s*(?:Args|Returns|Raises):", docstring)[0]
            paragraphs += [f"## {heading}", plain(before_sections)]
    for heading, text in _sections_of_pages(flag, name).items():
        paragraphs += [f"## {heading}", text]
    paragraphs += ["## Options", "\n".join(_options(methods, cls, flag))]
    recipes = list(_recipes(flag.removeprefix("--"), name))
    if recipes:
        paragraphs += [
            "## Recipes",
            "A file of flags each; you add model, task and sizes. [All recipes](../recipes.md).",
            *recipes,
        ]
    return "\n\n".join(paragraphs) + "\n"


def plain(text: str) -> str:
    """Sphinx's marks as Markdown's."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def _facts(methods: Registry, name: str, cls: type, flag: str) -> Iterator[str]:
    """The table at the beginning of a method's page, by lines."""
    yield f"| kind | {methods.kind} |\n| --- | --- |"
    paper = getattr(cls, "paper", "")
    if paper:
        linked = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", paper)
        yield f"| paper | {linked} ([all papers](../methods.md#papers)) |"
    yield f"| flag | `{flag} {name}` |"
    if methods is registry.perturbations:
        yield f"| default rate | {cls.rate:g} |"  # type: ignore[attr-defined]
        density = "density" in {field.name for field in method_texts.own_options(methods, cls)}
        yield f"| density | {'`--perturbation.density`' if density else 'none: the loss weighs the token'} |"
    about = of_registry(methods).page.removeprefix("docs/")
    yield f"| more | [{about.removesuffix('.md').replace('_', ' ')}](../{about}) |"
    yield f"| source | `{cls.__module__.replace('.', '/')}.py` |"


def _options(methods: Registry, cls: type, flag: str) -> Iterator[str]:
    """The table of a method's options, by lines."""
    own = [method_texts.option_row(cls, field) for field in method_texts.own_options(methods, cls)]
    if own:
        yield "| option | what | values | default |\n| --- | --- | --- | --- |"
    for name, about, limits, default in own:
        yield f"| `{flag}.{name}` | {cell(about)} | {cell(limits)} | {cell(default)} |"
    if not own:
        yield "None of its own."
    if methods is registry.perturbations:
        yield "\nAnd those of the gate, which all perturbations share: [training](../training.md#the-gate)."


def cell(text: str) -> str:
    """A text as the cell of a table in Markdown, in which | would end it."""
    return text.replace("|", "\\|")


def tables(name: str) -> Iterator[tuple[list[str], list[str]]]:
    """The rows of all tables of a page: the table's head, the row."""
    head: list[str] = []
    for line in (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines():
        cells = [text.strip() for text in re.split(r"(?<!\\)\|", line)[1:-1]]
        is_rule = bool(cells) and set(cells[0]) <= set("-: ")  # the line below a table's head
        if not cells:
            head = []
        elif not head:
            head = cells
        elif not is_rule:
            yield head, cells


def names(text: str, flag: str, name: str) -> bool:
    """Whether a flag takes this name in a text, alone or among others: ``--advantage psr|nsr``."""
    values = re.findall(rf"{re.escape(flag)} ([\w|\\]+)", text)
    return any(name in re.split(r"[|\\]+", value) for value in values)


def entries() -> Iterator[tuple[str, str]]:
    """The entries "- **`name`** …" of the pages, with defaults and differences: the names at the head, and the text."""
    for name in TABLES:
        page_text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        for head, text in re.findall(r"^- \*\*(`\w+`(?:, `\w+`)*)\*\* (.+)$", page_text, flags=re.MULTILINE):
            yield head, moved(text, name)


def _sections_of_pages(flag: str, name: str) -> dict[str, str]:
    """What the pages say of a method: when to use it, its cost, what is implemented and what differs."""
    when, cost = [], []
    quoted = f"`{name}`"
    for head, cells in tables("methods.md"):
        if "you want" in head and (quoted in cells[1] or names(cells[1], flag, name)):
            when.append(f"- **You want {cells[0]}.** {cells[2][:1].upper()}{cells[2][1:]}.")
        elif "its paper reports" in head and flag == "--perturbation" and quoted in cells[0]:
            cost += [f"- {title}: {value}" for title, value in zip(head[1:], cells[1:]) if value != "–"]
    differs = [text for head, text in entries() if quoted in head]
    sections = {
        "When to use it": moved("\n".join(when), "methods.md"),
        "What it changes and costs": moved("\n".join(cost), "methods.md"),
        "Defaults and differences": "\n\n".join(differs),
    }
    return {title: text.replace("\\|", "|") for title, text in sections.items() if text}


def moved(text: str, source: str) -> str:
    """The links of a text of a page of docs/, ``source``, as they are on a page one folder further down."""
    text = text.replace("](#", f"]({source}#")
    return re.sub(r"\]\((?!https?:|\.\./)", "](../", text)


def _recipes(key: str, name: str) -> Iterator[str]:
    """The files of examples/recipes/ that take this name: of methods in full, of papers their command."""
    folder = ROOT / "examples" / "recipes"
    for file in [*sorted((folder / "methods").glob("*.yaml")), *sorted(folder.glob("*.yaml"))]:
        text = file.read_text(encoding="utf-8")
        if yaml.safe_load(text).get(key) != name:
            continue
        comment, _, flags = text.partition("\n")
        yield comment.lstrip("# ") + ":"
        if file.parent != folder:
            yield f"```yaml\n{flags.strip()}\n```"
        yield f"```bash\nngrpo train --config {file.relative_to(ROOT)} ...\n```"
