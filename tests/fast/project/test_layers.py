# SPDX-License-Identifier: Apache-2.0
"""The tree's floors: a module imports what lies below it, and nothing goes round in a circle.

Read from the source, imports inside functions included. Imports under ``if TYPE_CHECKING`` are never executed, so they
may make a circle.
"""

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for top in ("perturbations", "ngrpo")
    for path in (ROOT / top).rglob("*.py")
}
# From the ground up, a folder above the other; a module is where the longest part of its name is.
FLOORS = (
    ("perturbations",),
    ("ngrpo",),
    (
        "ngrpo.machine.upstream",
        "ngrpo.machine.colors",
        "ngrpo.machine.console",
        "ngrpo.machine.progress",
        "ngrpo.machine.storage",
    ),
    ("ngrpo.machine.models",),
    ("ngrpo.machine.hardware",),
    ("ngrpo.patches", "ngrpo.methods"),
    ("ngrpo.methods.tasks",),
    ("ngrpo.config",),
    ("ngrpo.rollout",),
    ("ngrpo.trainers",),
    ("ngrpo.workbench.statistics", "ngrpo.workbench.evaluate", "ngrpo.workbench.report"),
    ("ngrpo.workbench.diagnose",),
    ("ngrpo.workbench.compare",),
    ("ngrpo.commands",),
    ("ngrpo.cli",),
)
# Names that say what a file is in its folder: the contract, its default, the package itself.
SAME_MEANING = {"__init__.py", "base.py", "default.py"}


def floor_of(module: str) -> int:
    """The number of a module's floor; a module of ``ngrpo`` that is not in the table has none."""
    parts = module.split(".")
    names = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
    known = [name for name in names if name != "ngrpo" or module == "ngrpo"]
    return next(number for name in known for number, floor in enumerate(FLOORS) if name in floor)


def imports(module: str) -> tuple[set[str], set[str]]:
    """Modules of ours that a module imports: when it runs, and for type checkers only."""
    runs: set[str] = set()
    typed: set[str] = set()

    def visit(node: ast.AST, into: set[str]) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, typed)
            return
        if isinstance(node, ast.Import):
            into.update(alias.name for alias in node.names if alias.name in MODULES)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                into.update({name if name in MODULES else str(node.module)} & MODULES.keys())
        for child in ast.iter_child_nodes(node):
            visit(child, into)

    visit(ast.parse(MODULES[module].read_text(encoding="utf-8")), runs)
    return runs - {module}, typed - {module}


GRAPH = {module: imports(module) for module in MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_from_its_floor_and_below(module: str) -> None:
    runs, typed = GRAPH[module]
    above = [other for other in runs | typed if floor_of(other) > floor_of(module)]
    assert not above, f"{module} imports {above}, which stand on higher floors"


def test_no_circles() -> None:
    try:
        TopologicalSorter({module: runs for module, (runs, _) in GRAPH.items()}).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_one_name_for_one_thing() -> None:
    homes = defaultdict(list)
    for path in MODULES.values():
        if path.parent.name != "commands":  # a command's file has the command's name
            homes[path.name].append(str(path.parent.relative_to(ROOT)))
    assert not {name: found for name, found in homes.items() if len(found) > 1 and name not in SAME_MEANING}
