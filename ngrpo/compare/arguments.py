"""The words of `ngrpo compare`, and the YAML file that may hold them, made into a plan."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ngrpo import presets, yaml_file
from ngrpo.compare.plan import BASELINE, Arm, Evaluation, Plan
from ngrpo.openrlhf_flags import Flags
from ngrpo.strategies import Strategy, parse_strategies
from perturbations.options import nearest

USAGE = """\
usage: ngrpo compare --perturbations NAME,NAME ... [--seeds 0,1,2] [--task NAME] [flags of ngrpo train ...]

Trains every strategy with every seed under the same trainer, data order and budget, evaluates each, and writes
results.json, results.csv and report.html. What has finished is kept: the same command goes on where it stopped.

  --perturbations A,B        operators, with options after colons: none,neighbor:rate=0.2,gumbel
  --strategy 'A x=1 --f=2'   one strategy: options, base=PRESET, advantage=NAME, and flags of its own; repeatable
  --sweep KEY=V,W            one run per value: perturbation.rate=0.05,0.1 for every operator that has the option,
                             or any flag of ngrpo train (rollout.temperature=0.8,1.2) for all; repeatable
  --base P,Q                 base algorithms: {presets}
  --seeds 0,1,2              seeds [0]
  --baseline ID              what the others are held against [none, or the first strategy]
  --config FILE              YAML with the same words as keys (see examples/ablation.yaml); a flag overrides it
  --out DIR                  the comparison's folder [runs/compare]
  --stock                    sample as stock OpenRLHF does: the same seed does not repeat a run then

evaluation of each trained model (perturbation off)
  --eval.data SRC            problems [the task's held-out ones; --eval.data none for no evaluation]
  --eval.n N                 samples per problem [8]
  --eval.OPTION VALUE        any other option of ngrpo eval, e.g. --eval.k 1,4,8 --eval.temperature 0.6

before training
  --diagnose.prompts N       prompts for the diversity-validity picture and the sample answers [8; 0: leave it out]
  --diagnose.OPTION VALUE    any other option of ngrpo diagnose, e.g. --diagnose.group 8 --diagnose.embedding-map

All other words go to ngrpo train, for all runs alike.
"""

# Set for each run by the comparison itself.
_OWN = (
    "--train.seed",
    "--run-dir",
    "--log-file",
    "--ckpt.output_dir",
    "--ckpt.path",
    "--logger.tensorboard_dir",
    "--perturbation",
    "--preset",
)
_SINGLE = {"--perturbations", "--base", "--seeds", "--baseline", "--out"}
_REPEATED = {"--strategy": "strategies", "--sweep": "sweeps"}
_GROUPS = ("eval", "diagnose")
# Flags of OpenRLHF that begin like ours.
_OPENRLHF_EVAL = ("--eval.dataset", "--eval.split", "--eval.steps", "--eval.temperature_", "--eval.n_samples")
_DEFAULT_N, _DEFAULT_PROMPTS = "8", "8"


@dataclass
class _Words:
    single: dict[str, str] = field(default_factory=dict)
    strategies: list[str] = field(default_factory=list)
    sweeps: list[str] = field(default_factory=list)
    groups: dict[str, dict[str, str]] = field(default_factory=lambda: {name: {} for name in _GROUPS})
    stock: bool = False
    rest: list[str] = field(default_factory=list)


def parse(words: Sequence[str]) -> tuple[Plan, Path]:
    """Reads the command line.

    Args:
        words: everything after ``ngrpo compare``.

    Returns:
        The plan and the comparison's folder. Operators have been loaded and their options checked; nothing else.

    Raises:
        ValueError: for anything that could not be run.
    """
    given = _sort(words)
    out = Path(given.single.get("out", "runs/compare")).expanduser()
    own_sweeps = [s for s in given.sweeps if s.lstrip("-").startswith("perturbation.")]
    named = given.single.get("perturbations")
    arms = [_Draft(s, {}) for s in parse_strategies(named, own_sweeps, ())] if named or own_sweeps else []
    arms += [_line(text) for text in given.strategies]
    if not arms:
        raise ValueError("nothing to compare: name strategies with --perturbations none,neighbor (see: ngrpo list).")
    arms = [draft.swept(values) for draft in arms for values in _flag_sweeps(given.sweeps)]
    bases = _list(given.single.get("base"), "--base")
    for base in bases:
        presets.check_name(base)
    drafts = [draft.on(base) for draft in arms for base in (bases or [None])]
    final = _distinct([draft.arm(given.stock) for draft in drafts])
    rest, task = given.rest, Flags(given.rest).value("--task")
    model = Flags(rest).value("--model") or Flags(rest).value("--actor.model_name_or_path") or ""
    return (
        Plan(
            arms=tuple(final),
            seeds=_seeds(given.single.get("seeds", "0")),
            baseline=_baseline(given.single.get("baseline"), final),
            shared=tuple(rest),
            model=model,
            task=task or Flags(rest).value("--data.prompt_dataset") or "",
            evaluation=_evaluation(given.groups["eval"], rest),
            diagnosis=_diagnosis(given.groups["diagnose"], rest, final),
            notes=tuple(dict.fromkeys(note for draft in drafts for note in draft.notes)),
        ),
        out,
    )


@dataclass(frozen=True)
class _Draft:
    """An arm in the making."""

    strategy: Strategy
    extras: Mapping[str, str]  # base, advantage, and flags: what is not an option of the perturbation

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(f"{self.strategy.id}: {note}" for note in self.strategy.notes)

    def on(self, base: str | None) -> _Draft:
        if base is None or "base" in self.extras:
            return self
        return dataclasses.replace(self, extras={**self.extras, "base": base})

    def swept(self, values: Mapping[str, str]) -> _Draft:
        return dataclasses.replace(self, extras={**values, **self.extras})

    def arm(self, stock: bool) -> Arm:
        strategy, extras = self.strategy, dict(self.extras)
        name, *options = strategy.id.split(" (")[0].split(" ")
        flags = ["--perturbation", name]
        for key, value in strategy.settings.items():
            flags += [f"--{key}", value]
        if not stock and "reproducible" not in extras:
            flags += ["--reproducible", "true"]
        base = extras.pop("base", None)
        if base is not None:
            presets.check_name(base)
            flags += ["--preset", base]
        for key, value in extras.items():
            flags += [f"--{key}"] if value == "" else [f"--{key}", *value.split(" ")]
        label = [name, *options, *(f"{k}={v}" if v else k for k, v in self.extras.items())]
        return Arm(
            " ".join(label),
            strategy.spec,
            base,
            {**strategy.settings, **self.extras},
            tuple(flags),
            strategy.paper,
        )


def _line(text: str) -> _Draft:
    """``neighbor rate=1 base=gspo --rollout.temperature=1.2``: options, then what is not one."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"--strategy {text!r}: {error}.") from None
    options, extras = [], {}
    for word in words:
        key, equals, value = word.partition("=")
        if word.startswith("--"):
            _refuse_own(key)
            extras[key[2:]] = value
        elif key.removeprefix("perturbation.") == "reproducible":
            extras["reproducible"] = value
        elif key in ("base", "advantage") or key.startswith("advantage."):
            if not equals or not value:
                raise ValueError(f"--strategy {text!r}: {key} needs a value, for example {key}=gspo.")
            extras[key] = value
        else:
            options.append(word)
    (strategy,) = parse_strategies(None, (), [shlex.join(options)])
    return _Draft(strategy, extras)


def _flag_sweeps(sweeps: Iterable[str]) -> list[dict[str, str]]:
    """Every combination of the swept flags that are not the perturbation's."""
    axes: dict[str, list[str]] = {}
    for text in sweeps:
        key, equals, values = text.lstrip("-").partition("=")
        if key.startswith("perturbation."):
            continue
        if not equals or not all(v.strip() for v in values.split(",")):
            raise ValueError(f"--sweep {text!r}: must be KEY=VALUE,VALUE, for example rollout.temperature=0.8,1.2.")
        if key == "seed" or key == "train.seed":
            raise ValueError("--sweep train.seed: give --seeds 0,1,2 instead.")
        _refuse_own(f"--{key}")
        axes[key] = [v.strip() for v in values.split(",")]
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def _sort(words: Sequence[str]) -> _Words:
    given, i = _Words(), 0
    config = Flags(words).value("--config")
    if config is not None:
        words = [*_from_file(config), *words]
    while i < len(words):
        name, equals, value = words[i].partition("=")
        i += 1
        group = next((g for g in _GROUPS if name.startswith(f"--{g}.") and not name.startswith(_OPENRLHF_EVAL)), None)
        if name == "--stock":
            given.stock = True
            continue
        if name not in {*_SINGLE, *_REPEATED, "--config"} and group is None:
            _refuse_own(name)
            _refuse_near(name)
            given.rest.append(words[i - 1])
            continue
        if not equals:
            value = "" if i >= len(words) or words[i].startswith("--") else words[i]
            i += bool(value)
        if not value and group is None:
            raise ValueError(f"{name} needs a value (see: ngrpo compare --help).")
        if name in _REPEATED:
            getattr(given, _REPEATED[name]).append(value)
        elif group is not None:
            given.groups[group][name[len(group) + 3 :]] = value
        elif name != "--config":
            given.single[name[2:]] = value
    return given


def _refuse_own(name: str) -> None:
    own = next((flag for flag in _OWN if name == flag or name.startswith(flag + ".")), None)
    if own is None:
        return
    mend = {
        "--train.seed": "give --seeds 0,1,2",
        "--perturbation": "give --perturbations, --strategy or --sweep perturbation.OPTION=...",
        "--preset": "give --base",
    }.get(own, "give --out DIR for the whole comparison")
    raise ValueError(f"{name} is set by ngrpo compare for each run: {mend} instead.")


def _refuse_near(name: str) -> None:
    """A misspelt flag of ours must not end in OpenRLHF, run by run."""
    ours = [*_SINGLE, *_REPEATED, "--config", "--stock"]
    hint = nearest(name, ours) if name.startswith("--") and "." not in name else ""
    if hint and name not in ("--task", "--model", "--hardware"):
        raise ValueError(f"unknown flag {name!r}.{hint} See: ngrpo compare --help")


def _from_file(path: str) -> list[str]:
    """The file as words, so that both ways mean the same."""
    loaded = yaml_file.read(path, flag="--config", example="'perturbations: none,neighbor'")
    known = {"perturbations", "strategies", "sweep", "base", "seeds", "baseline", "out", "stock", "flags", *_GROUPS}
    words: list[str] = []
    for key, value in loaded.items():
        if key not in known:
            raise ValueError(f"--config {path}: unknown key {key!r}.{nearest(str(key), known)} Keys: {_sorted(known)}.")
        if key == "strategies":
            words += [word for line in _as_list(value) for word in ("--strategy", line)]
        elif key == "stock":
            words += ["--stock"] if value else []
        elif key in ("sweep", "flags", *_GROUPS):
            if not isinstance(value, dict):
                raise ValueError(f"--config {path}: {key} must hold lines of 'option: value'.")
            words += _section(key, value)
        else:
            words += [f"--{key}", ",".join(_as_list(value))]
    return words


def _section(key: str, values: Mapping[str, Any]) -> list[str]:
    words = []
    for option, value in values.items():
        text = ",".join(_as_list(value))
        if key == "sweep":
            words += ["--sweep", f"{option}={text}"]
            continue
        flag = f"--{option}" if key == "flags" else f"--{key}.{option}"
        switch = value is True or value is None
        words += [flag] if switch else [flag, *text.split(" ")]
    return words


def _as_list(value: Any) -> list[str]:
    return [_plain(v) for v in value] if isinstance(value, list) else [_plain(value)]


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _list(text: str | None, flag: str) -> list[str]:
    values = [part.strip() for part in text.split(",")] if text else []
    if not all(values):
        raise ValueError(f"{flag} {text!r}: a value is missing between the commas.")
    return values


def _seeds(text: str) -> tuple[int, ...]:
    seeds = []
    for part in _list(text, "--seeds"):
        if not part.isdecimal():
            raise ValueError(f"--seeds {text!r}: {part!r} must be a whole number of at least 0, for example 0,1,2.")
        seeds.append(int(part))
    if len(set(seeds)) != len(seeds):
        raise ValueError(f"--seeds {text!r}: a seed is given twice; give different ones.")
    return tuple(seeds)


def _distinct(arms: list[Arm]) -> list[Arm]:
    seen: dict[str, int] = {}
    result = []
    for arm in arms:
        count = seen[arm.id] = seen.get(arm.id, 0) + 1
        result.append(arm if count == 1 else dataclasses.replace(arm, id=f"{arm.id} ({count})"))
    return result


def _baseline(wanted: str | None, arms: Sequence[Arm]) -> str:
    ids = [arm.id for arm in arms]
    if wanted is None:
        return next((i for i in ids if i.split(" ")[0] == BASELINE), ids[0])
    if wanted not in ids:
        raise ValueError(f"--baseline {wanted!r} is none of the strategies.{nearest(wanted, ids)} They are: {ids}.")
    return wanted


def _evaluation(options: dict[str, str], rest: Sequence[str]) -> Evaluation | None:
    if options.get("data") == "none":
        return None
    words: list[str] = []
    if "data" not in options and "task" not in options:
        task, held_out = Flags(rest).value("--task"), Flags(rest).value("--eval.dataset")
        if task:
            words += ["--task", task]
        elif held_out:
            words += ["--data", held_out]
        else:
            return None
    n = options.setdefault("n", _DEFAULT_N)
    if not n.isdecimal() or int(n) < 1:
        raise ValueError(f"--eval.n {n!r}: must be a whole number of at least 1.")
    for refused in ("model", "out", "perturbation"):
        if refused in options:
            raise ValueError(f"--eval.{refused} is set by ngrpo compare for each run; leave it out.")
    return Evaluation((*words, *_as_words(options)), int(n))


def _diagnosis(options: dict[str, str], rest: Sequence[str], arms: Sequence[Arm]) -> tuple[str, ...] | None:
    prompts = options.setdefault("prompts", _DEFAULT_PROMPTS)
    if not prompts.isdecimal():
        raise ValueError(f"--diagnose.prompts {prompts!r}: must be a whole number; 0 leaves the diagnosis out.")
    if int(prompts) == 0:
        return None
    words: list[str] = []
    if "data" not in options and "task" not in options:
        task, prompts_from = Flags(rest).value("--task"), Flags(rest).value("--data.prompt_dataset")
        words += ["--task", task] if task else ["--data", prompts_from or ""]
    if "max-tokens" not in options and Flags(rest).value("--rollout.max_new_tokens"):
        words += ["--max-tokens", Flags(rest).value("--rollout.max_new_tokens") or ""]
    lines = dict.fromkeys(arm.perturbation for arm in arms)
    strategies = [word for line in lines for word in ("--strategy", line)]
    return (*words, *_as_words(options), *strategies)


def _as_words(options: Mapping[str, str]) -> list[str]:
    return [word for key, value in options.items() for word in ([f"--{key}"] if value == "" else [f"--{key}", value])]


def _sorted(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
