# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's own parser and its own conditions on flags, asked before anything is loaded or started.

OpenRLHF 0.11.2 has both in the ``if __name__ == "__main__":`` block of its program, below imports that take many
seconds. That block alone is run here, up to the training that it ends with.
"""

import argparse
import ast
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, NoReturn

from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.machine.upstream.patch import around
from perturbations.errors import UsageError
from perturbations.options import nearest

_PROGRAM, _CONFIG = "cli/train_ppo_ray.py", "utils/config.py"
_HELP = "See: ngrpo train --openrlhf-help"
_NUMBER = re.compile(r"argument (?P<flag>\S+): invalid (?P<kind>int|float) value: (?P<value>.+)", re.DOTALL)
_OURS = ("--perturbation", "--advantage", "--preset", "--model", "--task", "--hardware", "--run-dir", "--log-file")
_OURS += ("--config", "--dry-run")


def check(argv: Sequence[str]) -> None:
    """Raises ``UsageError`` for complete flags that OpenRLHF's parser, or an assertion after it, would refuse."""
    try:
        _resolved(tuple(argv))
    except AssertionError as error:
        raise UsageError(f"OpenRLHF refuses these flags: {str(error).rstrip('.')}. {_HELP}") from None
    except UsageError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(f"OpenRLHF fails over these flags ({type(error).__name__}: {error}). {_HELP}") from None


@lru_cache(maxsize=1)
def defaults() -> dict[str, str]:
    """OpenRLHF's default of each flag that has one, as on a command line."""
    there = [action for action in _actions() if isinstance(action.default, str | int | float)]
    return {flag: str(action.default) for action in there for flag in action.option_strings}


def value_of(flags: Flags, name: str) -> str:
    """A flag's value, or OpenRLHF's default of it; empty where it has neither."""
    return flags.value(name) or defaults().get(name, "")


@lru_cache(maxsize=1)
def default_values() -> dict[str, Any]:
    """OpenRLHF's default of each argument, by its name without dashes."""
    return {action.dest: action.default for action in _actions() if action.dest != "help"}


def resolved(argv: Sequence[str]) -> dict[str, Any]:
    """OpenRLHF's arguments as its training would get them, by their names without dashes; `check` has accepted them."""
    return dict(_resolved(tuple(argv)))


@lru_cache
def _resolved(argv: tuple[str, ...]) -> dict[str, Any]:
    """Kept, since every rule on a run asks for them."""
    return _flat("", _run(argv)["args"])


def _flat(prefix: str, nested: SimpleNamespace) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in vars(nested).items():
        inner = isinstance(value, SimpleNamespace)
        settings |= _flat(f"{prefix}{name}.", value) if inner else {prefix + name: value}
    return settings


def print_help() -> None:
    """Prints OpenRLHF's own help."""
    try:
        _run(["--help"])
    except SystemExit:
        return


@around
def with_float32(
    original: Callable[..., argparse.Action], self: argparse.ArgumentParser, *names: str, **settings: Any
) -> argparse.Action:
    """`add_argument` of argparse: OpenRLHF's ``--ds.param_dtype`` has the choice fp32 too, see `hardware/cpu.py`."""
    if "--ds.param_dtype" in names:
        settings["choices"] = [*settings["choices"], "fp32"]
    return original(self, *names, **settings)


class _Parser(argparse.ArgumentParser):
    """OpenRLHF's parser, with errors in one line. An abbreviated flag would escape every check of ours."""

    add_argument = with_float32(argparse.ArgumentParser.add_argument)

    def __init__(self, argv: Sequence[str]) -> None:
        super().__init__(prog="ngrpo train", usage="ngrpo train [flags of OpenRLHF]", allow_abbrev=False)
        self._argv = argv

    def error(self, message: str) -> NoReturn:
        number = _NUMBER.fullmatch(message)
        if number:
            kind = "whole number" if number["kind"] == "int" else "number"
            raise UsageError(f"{number['flag']} {number['value']}: must be a {kind}. {_HELP}")
        raise UsageError(f"{message.removeprefix('argument ')}. {_HELP}")

    def parse_args(self) -> argparse.Namespace:  # type: ignore[override]
        namespace, unknown = self.parse_known_args(self._argv)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            what = "flag" if unknown[0].startswith("-") else "word"
            raise UsageError(f"unknown {what} {unknown[0]!r}.{nearest(unknown[0], [*flags, *_OURS])} {_HELP}")
        return namespace


@lru_cache(maxsize=1)
def _actions() -> list[argparse.Action]:
    """Of OpenRLHF's parser, after the shortest words that its conditions accept."""
    return _run(["--reward.remote_url", "reward.py"])["parser"]._actions


def _run(argv: Sequence[str]) -> dict[str, Any]:
    """Runs the block; returns its variables."""
    hierarchize, block = _compiled()
    parser = SimpleNamespace(ArgumentParser=partial(_Parser, argv))
    # It prints its warnings when the training starts.
    variables = {"argparse": parser, "datetime": datetime, "hierarchize": hierarchize, "print": lambda *parts: None}
    exec(block, variables)
    return variables


@lru_cache(maxsize=1)
def _compiled() -> tuple[Callable[[Any], Any], CodeType]:
    """OpenRLHF's function that nests arguments, and the block without its imports and without the training."""
    spec = find_spec("openrlhf")
    assert spec is not None and spec.origin is not None, "rules.check_stack comes first"
    folder = Path(spec.origin).parent
    nesting: dict[str, Any] = {}
    exec(compile((folder / _CONFIG).read_text(encoding="utf-8"), _CONFIG, "exec"), nesting)
    module = ast.parse((folder / _PROGRAM).read_text(encoding="utf-8"))
    block = next(node.body for node in module.body if isinstance(node, ast.If) and "__main__" in ast.dump(node.test))
    # `if args.use_ms:` goes with the imports: it imports a patch of the hub's client for the whole process.
    imports = ast.Import | ast.ImportFrom
    nodes = [node for node in block[:-1] if not any(isinstance(part, imports) for part in ast.walk(node))]
    return nesting["hierarchize"], compile(ast.Module(nodes, []), _PROGRAM, "exec")
