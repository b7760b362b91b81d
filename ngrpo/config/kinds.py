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
        suite: ``module:function`` of its conformance suite, ``inspect(target, kind, **options)``.
        page: the page of docs/ about it.
        in_rollouts: whether `eval` and `diagnose`, which do not train, accept it too.
        contract: its contract, as the message about a broken one names it.
        make: creates an object by name; the registry's own ``create`` where it is None.
        templates: the package with the folder ``templates``, which ``ngrpo new`` copies.
    """

    registry: registry.Registry
    flag: str
    about: str
    suite: str
    page: str = "docs/exploration.md"
    in_rollouts: bool = False
    contract: str = "the contract that rollout and replay rest on"
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
        gate = getattr(extension, "gate", None)
        for checkable in (extension, gate):
            if checkable is not None and not type(checkable).__module__.startswith(f"{checkable.registry.tree}."):
                check_contract(checkable)
        return extension, tuple(str(warning.message) for warning in caught)

    def option_fields(self, name: str, options: Mapping[str, Any]) -> dict[str, tuple[type, dataclasses.Field]]:
        """The options of an extension by name, each with the class that has it and its field.

        An option that names an extension itself, such as ``gate``, adds that one's options: ``gate.length``.
        """
        cls = self.registry.get(name, options.get("source"))
        fields = {entry.name: (cls, entry) for entry in dataclasses.fields(cls)}
        for entry in dataclasses.fields(cls):
            registry = entry.metadata.get("registry")
            value = options.get(entry.name, entry.default)
            if registry is None or not isinstance(value, str) or value.lower() == "none":
                continue
            inner_cls = registry.get(value, options.get(f"{entry.name}.source"))
            for inner in dataclasses.fields(inner_cls):
                fields[f"{entry.name}.{inner.name}"] = (inner_cls, inner)
        return fields

    def inspect(self, target: object, **options: object) -> Iterator[tuple[str, PerturbationError | None]]:
        """The outcomes of its conformance suite, one after the other."""
        return pkgutil.resolve_name(self.suite)(target, self.name, **options)

    def template(self, prefix: str = "") -> str:
        """What ``ngrpo new`` writes, or with ``test_`` its test."""
        path = f"templates/{prefix}{self.name}.txt"
        return (pkgutil.get_data(self.templates, path) or b"").decode()


_SUITE = "perturbations.testing:inspect"
_METHODS_SUITE = "ngrpo.config.method_checks:inspect"
_PAGE = "docs/own_perturbation.md"

ROWS = (
    Kind(
        registry=registry.perturbations,
        flag="--perturbation",
        about="what the model is fed for a sampled token",
        suite=_SUITE,
        page=_PAGE,
    ),
    Kind(
        registry=registry.gates,
        flag="--perturbation.gate",
        about="where a perturbation acts",
        suite=_SUITE,
        page=_PAGE,
    ),
    Kind(
        registry=registry.buffers,
        flag="--perturbation.replay_buffer",
        about="where finished trajectories wait for the trainer",
        suite=_SUITE,
        page=_PAGE,
    ),
    Kind(
        registry=advantages.registry,
        flag="--advantage",
        about="what the rewards of one prompt's responses become",
        suite="ngrpo.config.advantage_check:inspect",
        contract="the contract that the loss rests on",
        make=advantages.create,
    ),
    Kind(
        registry=credits.registry,
        flag="--credit",
        about="how a response's advantage is shared among its tokens",
        suite=_METHODS_SUITE,
        contract="the contract that the loss rests on",
    ),
    Kind(
        registry=policy_noises.registry,
        flag="--policy_noise",
        about="noise on the weights that roll out",
        suite=_METHODS_SUITE,
        in_rollouts=True,
        contract="the contract that rollouts rest on",
    ),
    Kind(
        registry=sampling_schedules.registry,
        flag="--sampling.schedule",
        about="temperatures that change within a response or over a run",
        suite=_METHODS_SUITE,
        in_rollouts=True,
        contract="the contract that rollouts rest on",
    ),
    Kind(
        registry=second_rounds.registry,
        flag="--second_round",
        about="further responses, where all are wrong or to refine the best one",
        suite=_METHODS_SUITE,
        contract="the contract that the second round rests on",
    ),
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
    for _, error in kind.inspect(extension):
        if error is not None:
            name = extension.registry.address(type(extension))
            raise UsageError(
                f"{extension.kind} {name!r} breaks its contract: {error.what.rstrip('.')}. {error.fix} (See: ngrpo"
                " check.)"
            )
