# SPDX-License-Identifier: Apache-2.0
"""The kinds of extension, a row for each, for `list`, `new`, `check`, the flags, the run and the docs.

A new kind is a row here and a folder: its registry, its contract in ``base.py`` and a file for each of its names.
"""

from __future__ import annotations

import dataclasses
import pkgutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ngrpo.methods import advantages, credits, policy_noises, sampling_schedules, second_rounds
from perturbations import registry
from perturbations.errors import UsageError

if TYPE_CHECKING:
    from perturbations.options import Options
    from perturbations.testing import PerturbationError


@dataclass(frozen=True)
class Kind:
    """One kind of extension.

    Attributes:
        registry: its names; it also has the entry points' group and the folder.
        flag: the flag that takes its names; options follow after a dot.
        about: what it is, for ``ngrpo new`` and ``ngrpo train --help``.
        page: the page of docs/ about it.
        in_rollouts: whether it changes rollouts that no training follows as well, as `eval` and `diagnose` draw them.
        suite: ``module:function`` of its conformance suite, ``inspect(target, kind, **options)``; empty for none.
        error_context: what depends on its contract, for messages.
        make: creates an object by name; the registry's own ``create`` where it is None.
        templates: the package with the folder ``templates``, which ``ngrpo new`` copies.
    """

    registry: registry.Registry
    flag: str
    about: str
    page: str = "docs/exploration.md"
    in_rollouts: bool = False
    suite: str = ""
    error_context: str = "rollout and replay rest"
    make: Callable[..., Any] | None = None
    templates: str = "ngrpo.commands"

    @property
    def name(self) -> str:
        """``policy_noise``: the word of ``ngrpo new``, the file of its template, and its key in a run."""
        return self.registry.kind.replace(" ", "_")

    @property
    def part_of_perturbation(self) -> bool:
        """Whether its flag is an option of the perturbation."""
        return self.flag.startswith("--perturbation.")

    def create(self, name: str, **options: object) -> Any:
        """An object of this kind; raises ``UsageError`` as :meth:`perturbations.registry.Registry.create`."""
        return (self.make or self.registry.create)(name, **options)

    def checked(self, name: str, options: Mapping[str, Any]) -> tuple[Any, tuple[str, ...]]:
        """An object, and what it warns of.

        Raises:
            UsageError: for an unknown name, options that are not its own, and a class of the user's, or a gate of
                theirs, that does not keep its contract: it would fail in a worker, once everything has started.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            extension = self.create(name, **options)
        for part in (extension, getattr(extension, "gate", None)):
            if part is not None and not type(part).__module__.startswith(f"{part.registry.tree}."):
                check_contract(part)
        return extension, tuple(str(warning.message) for warning in caught)

    def option_fields(self, name: str, options: Mapping[str, Any]) -> dict[str, tuple[type, dataclasses.Field]]:
        """The options of a name and, after a dot, of what they name themselves, such as a gate; each with its owner."""
        cls = self.registry.get(name, options.get("source"))
        found = {entry.name: (cls, entry) for entry in dataclasses.fields(cls)}
        for key, (_, entry) in list(found.items()):
            registry, value = entry.metadata.get("registry"), options.get(key, entry.default)
            if registry is not None and isinstance(value, str) and value.lower() != "none":
                owner = registry.get(value, options.get(f"{key}.source"))
                found |= {f"{key}.{own.name}": (owner, own) for own in dataclasses.fields(owner)}
        return found

    def inspect(self, target: object, **options: object) -> Iterator[tuple[str, PerturbationError | None]]:
        """The outcomes of its conformance suite, one after the other."""
        return pkgutil.resolve_name(self.suite)(target, self.name, **options)

    def template(self, prefix: str = "") -> str:
        """What ``ngrpo new`` writes, or with ``test_`` its test."""
        path = f"templates/{prefix}{self.name}.txt"
        return (pkgutil.get_data(self.templates, path) or b"").decode()


_SUITE, _PAGE = "perturbations.testing:inspect", "docs/own_perturbation.md"

ROWS = (
    Kind(registry.perturbations, "--perturbation", "what the model is fed for a sampled token", _PAGE, suite=_SUITE),
    Kind(registry.gates, "--perturbation.gate", "where a perturbation acts", _PAGE, suite=_SUITE),
    Kind(registry.buffers, "--perturbation.replay_buffer", "where finished trajectories wait for the trainer", _PAGE),
    Kind(
        advantages.registry,
        "--advantage",
        "what the rewards of one prompt's responses become",
        suite="ngrpo.config.advantage_check:inspect",
        error_context="the loss rests",
        make=advantages.create,
    ),
    Kind(credits.registry, "--credit", "how a response's advantage is shared among its tokens"),
    Kind(policy_noises.registry, "--policy_noise", "noise on the weights that roll out", in_rollouts=True),
    Kind(
        sampling_schedules.registry,
        "--sampling.schedule",
        "temperatures that change within a response or over a run",
        in_rollouts=True,
    ),
    Kind(second_rounds.registry, "--second_round", "further responses, where all are wrong or to refine the best one"),
)
KINDS = {kind.name: kind for kind in ROWS}
FLAGS = {kind.registry: kind.flag for kind in ROWS}


def of_registry(registry: registry.Registry) -> Kind:
    """The kind with this registry, as :attr:`perturbations.options.Options.registry` names it."""
    return next(kind for kind in KINDS.values() if kind.registry is registry)


def of_a_run() -> list[Kind]:
    """The kinds that set a run apart: a gate is a part of its perturbation, and a replay buffer changes no result."""
    return [kind for kind in KINDS.values() if not kind.part_of_perturbation]


def run_level_kinds() -> list[Kind]:
    """The kinds with a flag of their own that a run has in addition to its perturbation."""
    return [kind for kind in of_a_run() if kind.flag != "--perturbation"]


@lru_cache
def check_contract(extension: Options) -> None:
    """Raises ``UsageError`` for the first outcome of the conformance suite that is an error."""
    kind = of_registry(extension.registry)
    for _, error in kind.inspect(extension) if kind.suite else ():
        if error is not None:
            name = extension.registry.address(type(extension))
            fault = f"{error.what.rstrip('.')}. {error.fix}"
            raise UsageError(f"{extension.kind} {name!r} breaks its contract: {fault} (See: ngrpo check.)")
