# SPDX-License-Identifier: Apache-2.0
"""The flags of a command line: what was given, as argparse would read it, and what is added where it was not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

# A default of a flag: its value, several values, or None for a switch, which has none.
Default = str | tuple[str, ...] | None
# For a loss that is weighted by min(π / π_rollout, 10).
TRUNCATED_WEIGHTS: dict[str, Default] = {
    "--algo.advantage.is_correction_level": "token",
    "--algo.advantage.is_correction_mode": "clip",
    "--algo.advantage.is_correction_threshold": ("0", "10"),
}


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
    """The flags of a command line: the user's words, and the words that :meth:`with_defaults` added."""

    given: Sequence[str] = ()
    added: Sequence[str] = ()

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

    def with_defaults(self, defaults: Mapping[str, Default]) -> Flags:
        """The flags with the defaults of absent flags added."""
        new: list[str] = []
        for name, default in defaults.items():
            if not self.has(name):
                new += [name, *((default,) if isinstance(default, str) else default or ())]
        return Flags(self.given, (*self.added, *new))

    def without(self, *names: str) -> Flags:
        """The flags but those of these names."""
        return self._changed(lambda flag: () if flag.name in names else flag.argv)

    def replaced(self, ending: str, replace: Callable[[str], str]) -> Flags:
        """The flags with a function applied to the first value of each flag with this end."""

        def words(flag: Flag) -> tuple[str, ...]:
            if not flag.name.endswith(ending) or not flag.values:
                return flag.argv
            value = replace(flag.values[0])
            if "=" in flag.argv[0]:
                return (f"{flag.name}={value}", *flag.argv[1:])
            return (flag.name, value, *flag.argv[2:])

        return self._changed(words)

    def _changed(self, words: Callable[[Flag], tuple[str, ...]]) -> Flags:
        given, added = ([word for flag in Flags(argv) for word in words(flag)] for argv in (self.given, self.added))
        return Flags(given, added)
