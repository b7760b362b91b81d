# SPDX-License-Identifier: Apache-2.0
"""The conformance suites of perturbations and gates, ours and a third party's: the checks, in order."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from perturbations import Gate, Perturbation, registry
from perturbations.options import Options
from perturbations.registry import Registry
from perturbations.testing import declaration, proposal
from perturbations.testing.report import PerturbationError

__all__ = ["PerturbationError", "check_gate", "check_perturbation", "inspect", "outcomes"]

_Target = Options | type[Options] | str
_Checks = Iterator[tuple[str, Callable[[], object]]]


def check_perturbation(perturbation: Perturbation | type[Perturbation] | str, **options: object) -> None:
    """Checks that a perturbation keeps the contract of :class:`perturbations.Perturbation`, in under a second on a CPU.

    ``perturbation``: an object; or its class, registry name, ``./file.py:Name`` or ``package.module:Name`` with its
    ``options``. ``PerturbationError`` for the first broken promise, ``ValueError`` for an unknown name or option.
    """
    _raise_first(inspect(perturbation, "perturbation", **options))


def check_gate(gate: Gate | type[Gate] | str, **options: object) -> None:
    """Checks that a gate keeps the contract of :class:`perturbations.Gate`; as :func:`check_perturbation`."""
    _raise_first(inspect(gate, "gate", **options))


def inspect(
    target: _Target, kind: str = "perturbation", **options: object
) -> Iterator[tuple[str, PerturbationError | None]]:
    """Yields each check and its error, or None; nothing follows where the class itself is wrong.

    ``target`` and ``options`` as of :func:`check_perturbation`; ``kind``: ``perturbation`` or ``gate``.
    """
    registry, checks = _SUITES[kind]
    return outcomes(target, registry, checks, options)


def outcomes(
    target: _Target, registry: Registry, own: Callable[[Any], _Checks], options: dict[str, Any]
) -> Iterator[tuple[str, PerturbationError | None]]:
    """As :func:`inspect`, for any registry; ``own`` gives the checks of its kind beyond those of all options."""
    cls, made = registry.get(target) if isinstance(target, str) else target, None
    if not isinstance(cls, type):
        cls, made = type(cls), cls
        if options:
            late = f"options {', '.join(options)} come too late"
            raise ValueError(f"{late}: this {registry.kind} is already made. Pass its class.")
    declared = _outcome(partial(declaration.check_class, registry, cls, registry.base_class()))
    yield "the class, and how its options are declared", declared
    if declared is not None:
        return
    if made is None:
        cls.check_option_names(list(options))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            made = cls(**options)
    yield "values out of range are refused, in words", _outcome(partial(declaration.check_options, made))
    yield "another process makes the same from its spec", _outcome(partial(declaration.check_spec, made))
    for title, run in own(made):
        yield title, _outcome(run)


def _perturbation_checks(perturbation: Perturbation) -> _Checks:
    yield "a small model that it fits", partial(proposal.check_model, perturbation)
    try:
        vocabulary = proposal.check_model(perturbation)
    except PerturbationError:
        return
    if perturbation.has_parameters:
        yield "its learned parameters", partial(proposal.check_module, perturbation)
    for label, step in proposal.steps(vocabulary):
        yield f"proposals for {label}", partial(proposal.check_step, perturbation, label, step)


def _gate_checks(gate: Gate) -> _Checks:
    yield "it decides something", partial(proposal.check_decides, gate)
    yield "its plan of positions", partial(proposal.check_plan, gate)
    yield "the state that it declares", partial(proposal.check_state, gate)
    if _outcome(partial(proposal.check_state, gate)) is not None:
        return
    for label, step in proposal.steps(64):
        yield f"open rows for {label}", partial(proposal.check_open, gate, label, step)


_SUITES = {"perturbation": (registry.perturbations, _perturbation_checks), "gate": (registry.gates, _gate_checks)}


def _outcome(run: Callable[[], object]) -> PerturbationError | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            run()
        except PerturbationError as error:
            return error
    return None


def _raise_first(findings: Iterator[tuple[str, PerturbationError | None]]) -> None:
    for _, error in findings:
        if error is not None:
            raise error
