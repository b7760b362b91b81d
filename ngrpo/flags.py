"""The words of `ngrpo train`, sorted into ours and OpenRLHF's."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ngrpo import yaml_file
from ngrpo.openrlhf_flags import Default, Flags
from perturbations.errors import UsageError
from perturbations.options import nearest

PERTURBATION = "--perturbation"
ADVANTAGE = "--advantage"
SAMPLING = "--sampling"
REPRODUCIBLE = "--reproducible"
# A setting of the run, which is also taken where the options of the perturbation stand.
_REPRODUCIBLE_TOO = f"{PERTURBATION}.reproducible"
CONFIG = "config"
MODEL_FLAG = "model_name_or_path"
# Flags with options after a dot, and how each is written.
_ROOTS = {
    PERTURBATION: f"{PERTURBATION} NAME, {PERTURBATION}.<option> VALUE and {PERTURBATION}.{CONFIG} FILE",
    ADVANTAGE: f"{ADVANTAGE} NAME and {ADVANTAGE}.<option> VALUE",
    SAMPLING: f"{SAMPLING}.top_k K and {SAMPLING}.min_p P",
}
# Ours besides these: the field of TrainCommand that each one sets.
_OURS = {
    "--hardware": "hardware",
    "--task": "task",
    "--model": "model",
    "--run-dir": "run_dir",
    "--log-file": "log_file",
    "--preset": "preset",
}


@dataclass(frozen=True)
class TrainCommand:
    """What `ngrpo train` was asked to do.

    Attributes:
        spec: the perturbation, ``perturbations.create(**spec)``; None for ``none`` or rate 0.
        hardware: ``auto``, ``cpu`` or ``cuda``.
        openrlhf_args: OpenRLHF's flags, untouched and in their order.
        task: a name of :mod:`ngrpo.tasks`, or None.
        run_dir: folder for what this run writes, or None for a new one under ``runs/``.
        log_file: file for all that the engines print, with a few lines of progress on screen; None: screen.
        notes: warnings for the user about the perturbation.
        preset: a name of :mod:`ngrpo.presets`, or None.
        advantage: ``ngrpo.trainer.advantages.create(**advantage)``; None: OpenRLHF's own estimator.
        sampling: ``ngrpo.trainer.rollout_sampling.create(**sampling)``, empty where rollouts have no masks of ours.
        reproducible: whether the same seed is to give the same rollouts from run to run.
    """

    spec: dict[str, Any] | None
    hardware: str = "auto"
    openrlhf_args: tuple[str, ...] = ()
    task: str | None = None
    run_dir: str | None = None
    log_file: str | None = None
    notes: tuple[str, ...] = ()
    preset: str | None = None
    advantage: dict[str, Any] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    reproducible: bool = False


@dataclass
class _Words:
    """The command line after one pass, before anything is checked against an operator."""

    operator: str | None = None
    advantage: str | None = None
    config: str | None = None
    options: dict[str, str | None] = field(default_factory=dict)  # of the operator; None: the flag stood alone
    advantage_options: dict[str, str] = field(default_factory=dict)
    sampling: dict[str, str] = field(default_factory=dict)
    reproducible: str | None = None
    ours: dict[str, str] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)


def parse(words: Sequence[str]) -> TrainCommand:
    """Sorts the words of a command line.

    Args:
        words: everything after ``ngrpo train``.

    Returns:
        The command, with the perturbation's options checked. Nothing has been loaded or written.

    Raises:
        ValueError: for a misspelt operator or option, a bad value, or a flag of ours without its value.
    """
    sorted_words = _sort(words)
    spec, notes = _perturbation(sorted_words)
    reproducible = _switch(sorted_words.reproducible)
    if spec is None and reproducible and "seed" in sorted_words.options:
        notes.append(f"{PERTURBATION}.seed has no effect where nothing is perturbed; the draws follow --train.seed.")
    ours = sorted_words.ours
    rest = sorted_words.rest
    if "model" in ours:
        if Flags(rest).has(f"--actor.{MODEL_FLAG}"):
            raise ValueError(f"--model and --actor.{MODEL_FLAG} are the same setting; give one of them.")
        rest = [f"--actor.{MODEL_FLAG}", ours["model"], *rest]
    ours.pop("model", None)
    return TrainCommand(
        spec,
        openrlhf_args=tuple(rest),
        notes=tuple(notes),
        advantage=_advantage(sorted_words),
        sampling=_sampling(sorted_words.sampling),
        reproducible=reproducible,
        **ours,
    )


def replace_model_names(flags: Flags, replace: Callable[[str], str]) -> Flags:
    """Applies a function to each name in each ``*model_name_or_path`` flag; several may stand with commas."""
    return flags.replaced(MODEL_FLAG, lambda value: ",".join(replace(name.strip()) for name in value.split(",")))


def output_flags(run: Path) -> dict[str, Default]:
    """OpenRLHF's output flags for a run's folder."""
    return {
        "--ckpt.output_dir": str(run / "model"),
        "--ckpt.path": str(run / "checkpoints"),
        "--logger.tensorboard_dir": str(run / "tensorboard"),
    }


def _sort(words: Sequence[str]) -> _Words:
    result = _Words()
    i = 0
    while i < len(words):
        word = words[i]
        name, equals, value = word.partition("=")
        root = name.split(".", 1)[0]
        if root not in _ROOTS and name not in _OURS and name != REPRODUCIBLE:
            _refuse_near_miss(name, root)
            result.rest.append(word)
            i += 1
            continue
        given: str | None = value if equals else None
        if not equals and i + 1 < len(words) and not words[i + 1].startswith("--"):
            given = words[i + 1]
            i += 1
        i += 1
        _store(result, name, given)
    return result


def _store(result: _Words, name: str, given: str | None) -> None:
    root, _, option = name.partition(".")
    if name in (REPRODUCIBLE, _REPRODUCIBLE_TOO):
        result.reproducible = "true" if given is None else given
        return
    if root == PERTURBATION and option and option != CONFIG:
        result.options[option] = given
        return
    if root == SAMPLING and not option:
        raise ValueError(f"{SAMPLING} needs an option: {_ROOTS[SAMPLING]}.")
    if not given:
        needs = {PERTURBATION: "an operator's name (see: ngrpo list)", ADVANTAGE: "an advantage's name"}
        raise ValueError(f"{name} needs {needs.get(name, 'a value (see: ngrpo train --help)')}.")
    if root == PERTURBATION and option == CONFIG:
        result.config = given
    elif name == PERTURBATION:
        result.operator = given
    elif name == ADVANTAGE:
        result.advantage = given
    elif root == ADVANTAGE:
        result.advantage_options[option] = given
    elif root == SAMPLING:
        result.sampling[option] = given
    else:
        result.ours[_OURS[name]] = given


def _refuse_near_miss(name: str, root: str) -> None:
    """A misspelt flag of ours must not reach OpenRLHF, where it would be an unknown word among many."""
    known = next((r for r in (*_ROOTS, "--preset", REPRODUCIBLE) if _resembles(root, r)), None)
    if known is None:
        return
    rest = "" if root == known else name[len(root) :]
    if root.startswith((known + "_", known + "-")):
        rest = "." + root[len(known) + 1 :] + rest
    flags = _ROOTS.get(known, known if known == REPRODUCIBLE else f"{known} NAME")
    raise UsageError(f"unknown flag {name!r}. Did you mean {known + rest!r}? The flags are {flags}.")


def _resembles(word: str, flag: str) -> bool:
    return difflib.SequenceMatcher(None, word, flag).ratio() >= 0.8 or word.startswith(flag[:8])


def _advantage(words: _Words) -> dict[str, Any] | None:
    if words.advantage in (None, "none"):
        if words.advantage_options:
            first = next(iter(words.advantage_options))
            raise ValueError(f"{ADVANTAGE}.{first} is given, but no advantage. Add {ADVANTAGE} NAME.")
        return None
    from ngrpo.trainer import advantages

    return advantages.create(words.advantage, **words.advantage_options).spec()


def _switch(value: str | None) -> bool:
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if value is not None and value.lower() not in values:
        raise UsageError(f"{REPRODUCIBLE} {value}: true or false is needed, or the flag alone for true.")
    return value is not None and values[value.lower()]


def _sampling(options: dict[str, str]) -> dict[str, Any]:
    if not options:
        return {}
    from ngrpo.trainer import rollout_sampling

    return rollout_sampling.create(**options).given()


def _perturbation(words: _Words) -> tuple[dict[str, Any] | None, list[str]]:
    options: dict[str, Any] = {}
    if words.config:
        example = "'name: neighbor' and 'rate: 0.1'"
        options = yaml_file.read(words.config, flag=f"{PERTURBATION}.{CONFIG}", example=example)
    in_file = options.pop("name", None)
    in_file_reproducible = options.pop("reproducible", None)
    if words.reproducible is None and in_file_reproducible is not None:
        words.reproducible = str(in_file_reproducible)
    operator = words.operator if words.operator is not None else in_file
    if operator is None:
        if words.options or options:
            first = next(iter({**options, **words.options}))
            hint = nearest(first, ["name"]) if words.config else ""
            raise ValueError(
                f"perturbation option {first!r} is given, but no operator.{hint} Add {PERTURBATION} NAME"
                f"{' or a line name: NAME in ' + words.config if words.config else ''} (see: ngrpo list)."
            )
        return None, []
    return _create(str(operator), {**options, **words.options}, words)


def _create(operator: str, options: dict[str, Any], words: _Words) -> tuple[dict[str, Any] | None, list[str]]:
    from perturbations import registry
    from perturbations.options import kinds

    cls = registry.get(operator, options.get("source"))
    gate = options.get("gate")
    for name, value in words.options.items():
        owner, own = cls, name
        if name.startswith(registry.GATE_OPTION) and isinstance(gate, str) and gate.lower() != "none":
            owner, own = registry.gates.get(gate, options.get("gate.source")), name[len(registry.GATE_OPTION) :]
        if value is None and own in getattr(owner, "__dataclass_fields__", ()):
            if bool not in kinds(owner, own):
                raise ValueError(f"{PERTURBATION}.{name} needs a value (see: ngrpo train --help).")
            options[name] = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made = registry.create(operator, **options)
        except ValueError as error:
            if words.config:
                raise ValueError(f"{error} (options from {words.config} and the command line)") from None
            raise
    return (made.spec() if made.active else None), [str(warning.message) for warning in caught]
