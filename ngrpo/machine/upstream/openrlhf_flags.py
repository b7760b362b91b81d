# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's flags: what was given, as argparse would read it, what is added, and the arguments that OpenRLHF gets.

OpenRLHF 0.11.2 has its parser and its conditions in the ``if __name__ == "__main__":`` block of its program, below
imports that take many seconds. That block alone is run here, up to the training that it ends with.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, NoReturn

from ngrpo.machine.upstream.patch import around
from perturbations.errors import UsageError, nearest

# A default of a flag: its value, several values, or None for a switch, which has none.
Default = str | tuple[str, ...] | None
MODEL_NAMES = "model_name_or_path"
"""The end of each flag that names a model."""
SIZES = ("--rollout.batch_size", "--rollout.n_samples_per_prompt", "--train.batch_size", "--train.max_epochs")
"""Prompts of a step, responses to each, responses of an update, and how often a step trains its responses."""
# For a loss that is weighted by min(π / π_rollout, 10).
TRUNCATED_WEIGHTS: dict[str, Default] = {
    "--algo.advantage.is_correction_level": "token",
    "--algo.advantage.is_correction_mode": "clip",
    "--algo.advantage.is_correction_threshold": ("0", "10"),
}

_PROGRAM, _CONFIG = "cli/train_ppo_ray.py", "utils/config.py"
_HELP = "See: ngrpo train --openrlhf-help"
_NUMBER = re.compile(r"argument (?P<flag>\S+): invalid (?P<kind>int|float) value: (?P<value>.+)", re.DOTALL)
_OURS = ("--perturbation", "--advantage", "--preset", "--model", "--task", "--hardware", "--run-dir", "--log-file")
_OURS += ("--config", "--dry-run")


@dataclass(frozen=True)
class Flag:
    """One flag on a command line: its name, empty for words before the first flag; its values; and its words.

    Values are the words up to the next flag; ``--name=value`` counts as well.
    """

    name: str
    values: tuple[str, ...]
    argv: tuple[str, ...]


@dataclass(frozen=True)
class Flags:
    """The flags of a command line: the user's words, and the words that :meth:`with_defaults` added.

    ``off``: flags that no default brings back.
    """

    given: Sequence[str] = ()
    added: Sequence[str] = ()
    off: frozenset[str] = frozenset()

    @property
    def argv(self) -> list[str]:
        """All words; the added ones come first."""
        return [*self.added, *self.given]

    def __iter__(self) -> Iterator[Flag]:
        """Flag by flag, in the order of the words."""
        argv = self.argv
        starts = [i for i, word in enumerate(argv) if i == 0 or word.startswith("--")]
        for start, end in zip(starts, [*starts[1:], len(argv)]):
            name, equals, value = argv[start].partition("=")
            part = tuple(argv[start:end])
            if name.startswith("--"):
                yield Flag(name, (value, *part[1:]) if equals else part[1:], part)
            else:
                yield Flag("", part, part)

    def value(self, name: str) -> str | None:
        """The value that argparse would take: the last one given; "" for a switch, None where the flag is absent."""
        found = [flag.values for flag in self if flag.name == name]
        return next(iter(found[-1]), "") if found else None

    def has(self, *names: str) -> bool:
        """Whether one of these flags is there."""
        return any(flag.name in names for flag in self)

    @cached_property
    def args(self) -> dict[str, Any]:
        """OpenRLHF's arguments as its training would get them, by their names without dashes.

        Raises:
            UsageError: for flags that OpenRLHF's parser, or an assertion after it, would refuse.
        """
        try:
            return _flat("", parsed(self.argv)["args"])
        except AssertionError as error:
            raise UsageError(f"OpenRLHF refuses these flags: {str(error).rstrip('.')}. {_HELP}") from None
        except UsageError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UsageError(f"OpenRLHF fails over these flags ({type(error).__name__}: {error}). {_HELP}") from None

    def or_default(self, name: str) -> str:
        """A flag's value, or OpenRLHF's default of it; empty where it has neither."""
        return self.value(name) or defaults().get(name, "")

    def with_defaults(self, defaults: Mapping[str, Default]) -> Flags:
        """The flags with the defaults of absent flags added."""
        new: list[str] = []
        for name, default in defaults.items():
            if not self.has(name) and name not in self.off:
                new += [name, *((default,) if isinstance(default, str) else default or ())]
        return replace(self, added=(*self.added, *new)) if new else self  # its arguments may be parsed already

    def without(self, *names: str) -> Flags:
        """The flags but those of these names."""
        return self._changed(lambda flag: () if flag.name in names else flag.argv)

    def without_false(self) -> Flags:
        """The flags but those with the value ``false``, which are :attr:`off`."""
        off = frozenset(flag.name for flag in self if flag.values == ("false",))
        return replace(self.without(*off), off=off)

    def replaced(self, ending: str, change: Callable[[str], str]) -> Flags:
        """The flags with a function applied to each part, between commas, of the first value of flags that end so."""

        def words(flag: Flag) -> tuple[str, ...]:
            if not flag.name.endswith(ending) or not flag.values:
                return flag.argv
            value = ",".join(change(part.strip()) for part in flag.values[0].split(","))
            return (flag.name, value, *flag.values[1:])

        return self._changed(words)

    def _changed(self, words: Callable[[Flag], tuple[str, ...]]) -> Flags:
        given, added = ([word for flag in Flags(argv) for word in words(flag)] for argv in (self.given, self.added))
        return Flags(given, added, self.off)


@lru_cache(maxsize=1)
def defaults() -> dict[str, str]:
    """OpenRLHF's default of each flag that has one, as on a command line."""
    there = [action for action in actions() if isinstance(action.default, str | int | float)]
    return {flag: str(action.default) for action in there for flag in action.option_strings}


@lru_cache(maxsize=1)
def actions() -> list[argparse.Action]:
    """Of OpenRLHF's parser, after the shortest words that its conditions accept."""
    return parsed(["--reward.remote_url", "reward.py"])["parser"]._actions


def _flat(prefix: str, nested: SimpleNamespace) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in vars(nested).items():
        inner = isinstance(value, SimpleNamespace)
        settings |= _flat(f"{prefix}{name}.", value) if inner else {prefix + name: value}
    return settings


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


def parsed(argv: Sequence[str]) -> dict[str, Any]:
    """Runs OpenRLHF's block; returns its variables, ``parser`` and ``args`` among them."""
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
    assert spec is not None and spec.origin is not None, "versions.check_stack comes first"
    folder = Path(spec.origin).parent
    nesting: dict[str, Any] = {}
    exec(compile((folder / _CONFIG).read_text(encoding="utf-8"), _CONFIG, "exec"), nesting)
    module = ast.parse((folder / _PROGRAM).read_text(encoding="utf-8"))
    block = next(node.body for node in module.body if isinstance(node, ast.If) and "__main__" in ast.dump(node.test))
    # `if args.use_ms:` goes with the imports: it imports a patch of the hub's client for the whole process.
    imports = ast.Import | ast.ImportFrom
    nodes = [node for node in block[:-1] if not any(isinstance(part, imports) for part in ast.walk(node))]
    return nesting["hierarchize"], compile(ast.Module(nodes, []), _PROGRAM, "exec")
