# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's flags: what was given, as argparse would read it, what is added, and the arguments that OpenRLHF gets.

OpenRLHF 0.11.2 has its parser and its conditions in the ``if __name__ == "__main__":`` block of its program, below
imports that take many seconds. That block alone is run here, up to the training that it ends with.
"""

from __future__ import annotations

import argparse
import ast
import re
import shlex
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
DATASETS = {"--data.prompt_dataset": "--data.prompt_split", "--eval.dataset": "--eval.split"}
"""The flags of the training's and of the evaluation's data, each with that of its split."""
# For a loss that is weighted by min(π / π_rollout, 10).
TRUNCATED_WEIGHTS: dict[str, Default] = {
    "--algo.advantage.is_correction_level": "token",
    "--algo.advantage.is_correction_mode": "clip",
    "--algo.advantage.is_correction_threshold": ("0", "10"),
}

_PROGRAM = "cli/train_ppo_ray.py"
_CONFIG = "utils/config.py"
_HELP = "See: ngrpo train --openrlhf-help"
_NUMBER = re.compile(r"argument (?P<flag>\S+): invalid (?P<kind>int|float) value: (?P<value>.+)", re.DOTALL)
_NEGATIVE = re.compile(r"-(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|inf)$")
_ONE_VALUE = "one value; quote one that has blanks, in a YAML file twice: \"'a b'\""
# Flags of ngrpo that an unknown word may be meant to be.
_OURS = (
    "--perturbation",
    "--advantage",
    "--preset",
    "--model",
    "--task",
    "--hardware",
    "--run-dir",
    "--log-file",
    "--config",
    "--dry-run",
)


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
    """The flags of a command line.

    Attributes:
        given: the user's words.
        added: the words that :meth:`with_defaults` added.
        off: flags that no default brings back.
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
            words = tuple(argv[start:end])
            name, equals, value = words[0].partition("=")
            if not name.startswith("--"):
                yield Flag(name="", values=words, argv=words)
            elif equals:
                yield Flag(name=name, values=(value, *words[1:]), argv=words)
            else:
                yield Flag(name=name, values=words[1:], argv=words)

    def value(self, name: str) -> str | None:
        """The value that argparse would take: the last one given; "" for a switch, None where the flag is absent."""
        last_value = None
        for flag in self:
            if flag.name == name:
                last_value = flag.values[0] if flag.values else ""
        return last_value

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
            if self.has(name) or name in self.off:
                continue
            new.append(name)
            if isinstance(default, str):
                new.append(default)
            elif default is not None:
                new += default
        if not new:
            return self  # with its arguments, which may be parsed already
        return replace(self, added=(*self.added, *new))

    def without(self, *names: str) -> Flags:
        """The flags but those of these names."""
        return self._changed(lambda flag: () if flag.name in names else flag.argv)

    def without_false(self) -> Flags:
        """The flags but those whose last value is ``false``, which are :attr:`off`."""
        last = {flag.name: flag for flag in self}
        off = frozenset(name for name, flag in last.items() if flag.values == ("false",))
        kept = self._changed(lambda flag: () if flag.name in off or flag.values == ("false",) else flag.argv)
        return replace(kept, off=self.off | off)

    def replaced(self, ending: str, change: Callable[[str], str]) -> Flags:
        """The flags with a function applied to each part, between commas, of the first value of flags that end so."""

        def words(flag: Flag) -> tuple[str, ...]:
            if not flag.name.endswith(ending) or not flag.values:
                return flag.argv
            names = flag.values[0].split(",")
            changed_names = ",".join(change(name.strip()) for name in names)
            return (flag.name, changed_names, *flag.values[1:])

        return self._changed(words)

    def _changed(self, words: Callable[[Flag], tuple[str, ...]]) -> Flags:
        """The flags with other words for each flag."""

        def changed(argv: Sequence[str]) -> list[str]:
            new_argv: list[str] = []
            for flag in Flags(argv):
                new_argv += words(flag)
            return new_argv

        return Flags(given=changed(self.given), added=changed(self.added), off=self.off)


@lru_cache(maxsize=1)
def defaults() -> dict[str, str]:
    """OpenRLHF's default of each flag that has one, as on a command line."""
    by_flag = {}
    for action in actions():
        if isinstance(action.default, str | int | float) and action.default != argparse.SUPPRESS:
            for flag in action.option_strings:
                by_flag[flag] = str(action.default)
    return by_flag


@lru_cache(maxsize=1)
def actions() -> list[argparse.Action]:
    """Of OpenRLHF's parser, after the shortest words that its conditions accept."""
    return parsed(["--reward.remote_url", "reward.py"])["parser"]._actions


def _flat(prefix: str, nested: SimpleNamespace) -> dict[str, Any]:
    """The values of nested namespaces, with a dot between the names."""
    settings: dict[str, Any] = {}
    for name, value in vars(nested).items():
        if isinstance(value, SimpleNamespace):
            settings |= _flat(f"{prefix}{name}.", value)
        else:
            settings[f"{prefix}{name}"] = value
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
        # Python 3.11's takes -1e-05 for a flag, and so the flag before it has a value too few.
        self._negative_number_matcher = _NEGATIVE
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
            raise UsageError(f"{left_over(unknown[0], self._argv, self._actions, _OURS)} {_HELP}")
        return namespace


def left_over(word: str, argv: Sequence[str], actions: Sequence[argparse.Action], others: Sequence[str] = ()) -> str:
    """What is wrong with a word that a parser could not place: a flag's surplus value, or unknown.

    ``argv`` are all words that were parsed, ``actions`` the parser's; ``others`` are flags that another parser has.
    """
    most_values = _most_values(actions)
    if word.startswith("-"):
        return f"unknown flag {word!r}.{nearest(word, [*others, *most_values])}"
    for flag in Flags(argv):
        most = most_values.get(flag.name)
        if isinstance(most, int) and word in flag.values[most:]:
            takes = {0: "no value; write the flag alone", 1: _ONE_VALUE}.get(most, f"{most} values")
            return f"{flag.name} {shlex.join(flag.values)}: takes {takes}."
    return f"unknown word {word!r}.{nearest(word, [*others, *most_values])}"


def _most_values(actions: Sequence[argparse.Action]) -> dict[str, int | str | None]:
    """How many values each flag of a parser takes at most; a text such as "*" where there is no such number."""
    most_values: dict[str, int | str | None] = {}
    for action in actions:
        for flag_name in action.option_strings:
            most_values[flag_name] = 1 if action.nargs in (None, "?") else action.nargs
    return most_values


def takes_several_values(name: str) -> bool:
    """Whether a flag of OpenRLHF takes more than one value, as --actor.eps_clip_low_high does."""
    return _most_values(actions()).get(name, 1) not in (0, 1)


def check_words(flags: Flags) -> None:
    """Raises ``UsageError`` for a flag that OpenRLHF does not have, and for a value too many."""
    most_values = _most_values(actions())
    for flag in flags:
        if flag.name not in most_values:
            word = flag.argv[0]
        else:
            most = most_values[flag.name]
            surplus = flag.values[most:] if isinstance(most, int) else ()
            if not surplus:
                continue
            word = surplus[0]
        raise UsageError(f"{left_over(word, flag.argv, actions(), _OURS)} {_HELP}")


def parsed(argv: Sequence[str]) -> dict[str, Any]:
    """Runs OpenRLHF's block; returns its variables, ``parser`` and ``args`` among them."""
    hierarchize, block = _compiled()
    variables: dict[str, Any] = {
        "argparse": SimpleNamespace(ArgumentParser=partial(_Parser, argv)),
        "datetime": datetime,
        "hierarchize": hierarchize,
        "print": lambda *values: None,  # OpenRLHF prints its warnings when the training starts
    }
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
    block: list[ast.stmt] = []
    for node in module.body:
        if isinstance(node, ast.If) and "__main__" in ast.dump(node.test):
            block = node.body
    # `if args.use_ms:` is left out with the imports: it imports a patch of the hub's client for the whole process.
    statements = [statement for statement in block[:-1] if not _imports(statement)]
    return nesting["hierarchize"], compile(ast.Module(statements, []), _PROGRAM, "exec")


def _imports(statement: ast.stmt) -> bool:
    """Whether a statement is, or has in it, an import."""
    return any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(statement))
