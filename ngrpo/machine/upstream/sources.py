# SPDX-License-Identifier: Apache-2.0
"""The state of upstream definitions, read from their sources: importing OpenRLHF takes seconds and needs flash_attn."""

from __future__ import annotations

import ast
import hashlib
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path

IMPORT = "<import>"
"""In place of a definition's name: the import of the module itself."""
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_MISSING = "nothing of that name"


def state_of(module: str, attribute: str, expected: str, root: Path | None = None) -> str:
    """The state of an upstream definition, in the form of the expected one.

    Args:
        module: upstream module.
        attribute: dotted name inside it, or `IMPORT`.
        expected: ``"sha:…"`` of the definition's source; its parameter names ``"(self, x)"``, where ``...`` stands for
            any others; ``"class"``; or ``"import"`` for a name that the module merely imports.
        root: folder with the sources of another release; None for the installed one.

    Returns:
        ``expected`` where the definition fits it, otherwise what was found.
    """
    source = source_of(module, root)
    if source is None:
        return f"no module {module}"
    tree = _parsed(source)
    if expected == "import":
        return "import" if attribute == IMPORT or _imports(tree, attribute) else _MISSING
    node = definition(tree, attribute)
    if node is None:
        return _MISSING
    if not expected.startswith("sha:"):
        if isinstance(node, ast.ClassDef):
            return "class"
        arguments = node.args
        names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        found = f"({', '.join(names)})"
        return expected if fnmatchcase(found, expected.replace("...", "*")) else found
    # A hash of the text and not of the tree, because ast.dump differs between Python versions.
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = [line.rstrip() for line in source.splitlines()[start - 1 : node.end_lineno]]
    return "sha:" + hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


@cache
def source_of(module: str, root: Path | None = None) -> str | None:
    """The source of a module, installed or below a folder; None where there is no such module."""
    if root is None:
        spec = find_spec(module.partition(".")[0])
        if spec is None or not spec.origin:
            return None
        origin = Path(spec.origin)
        root = origin.parents[1] if origin.name == "__init__.py" else origin.parent
    path = root.joinpath(*module.split("."))
    file = next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)
    return None if file is None else file.read_text(encoding="utf-8")


def definition(tree: ast.Module, dotted: str) -> Definition | None:
    """The last definition of a dotted name in a module."""
    node: ast.Module | Definition = tree
    for name in dotted.split("."):
        matches = [each for each in node.body if isinstance(each, Definition) and each.name == name]
        if not matches:
            return None
        node = matches[-1]
    return node if isinstance(node, Definition) else None


_parsed = cache(ast.parse)


def _imports(tree: ast.Module, name: str) -> bool:
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Import))
    return any(name == (alias.asname or alias.name) for node in imports for alias in node.names)
