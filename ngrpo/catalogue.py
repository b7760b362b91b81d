"""What the registries hold, as text: `ngrpo list` and `ngrpo train --help`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib.metadata import entry_points

from ngrpo import advantages
from ngrpo.openrlhf_flags import Flags
from perturbations import registry
from perturbations.base import Perturbation
from perturbations.options import allowed, kinds
from perturbations.registry import Registry

_TRAIN = """\
usage: ngrpo train [--perturbation NAME] [--perturbation.<option> VALUE ...] [--advantage NAME] [--preset NAME]
                   [flags of OpenRLHF ...]

Runs OpenRLHF's train_ppo_ray with perturbed rollouts. Our flags stand below; every other word goes to
OpenRLHF untouched. Its own help: ngrpo train --openrlhf-help

  --perturbation NAME            an operator; your own: ./file.py:Name, package.module:Name [none: stock OpenRLHF]
  --perturbation.<option> VALUE  an option of the operator, see below; a switch may stand alone
  --perturbation.gate NAME       a further gate, named in the same ways; its options: --perturbation.gate.<option>
  --perturbation.config FILE     YAML with the same options and 'name'; a flag overrides the file
  --advantage NAME               an advantage of ours, see below; your own as above [none: OpenRLHF's estimator];
                                 ngrpo is NGRPO, negative-enhanced GRPO; N-GRPO is --perturbation neighbor
  --advantage.<option> VALUE     an option of the advantage
  --preset NAME                  a set of OpenRLHF flags, printed; your flags win: {presets}
  --sampling.top_k K             draw training rollouts from the K likeliest tokens; evaluation is as it was
  --sampling.min_p P             … from tokens with at least P times the likeliest one's probability
  --sampling.correct_mask        take log-probabilities among the tokens that top-p, top-k and min-p left
                                 (temperature and top-p: --rollout.temperature, --rollout.top_p)
  --reproducible                 the same seed gives the same rollouts from run to run: whole batches in a fixed order
  --model NAME                   = --actor.model_name_or_path; packaged models: {models}
  --task NAME                    dataset and reward where you give none: {tasks}
  --hardware auto|cpu|cuda       hardware profile                                  [auto: CUDA if present]
  --run-dir DIR                  model, checkpoints, TensorBoard log, summary.json [runs/<time>-<operator>]
  --log-file FILE                what the engines print goes there, a few lines of progress to the screen

examples
  ngrpo train --perturbation neighbor --perturbation.rate 0.1 --perturbation.k 3 --model smollm2-135m \\
      --task arithmetic --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 4
  ngrpo train --perturbation.config neighbor.yaml --perturbation.rate 0.15 ...
"""

# Each registry, and the flag that takes its names.
_KINDS = {
    registry.operators: "--perturbation",
    registry.gates: "--perturbation.gate",
    advantages.registry: "--advantage",
}


def listing() -> str:
    """One line for each perturbation, gate and advantage: name, source, paper, what it does."""
    return "\n\n".join(map(_rows, _KINDS))


def _rows(kept: Registry) -> str:
    rows = [(kept.kind, "source", "" if kept is registry.gates else "paper", "")]
    for name, address in kept.available().items():
        try:
            cls = kept.get(name)
        except ValueError as error:
            rows.append((name, _source(kept, name, address), "cannot be loaded", str(error)))
            continue
        rows.append((name, _source(kept, name, address), getattr(cls, "paper", ""), _first_line(cls)))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[3]]).rstrip() for row in rows)


def train_help(words: Sequence[str] = ()) -> str:
    """The help of ``ngrpo train``: our flags, then every perturbation, gate and advantage with its options.

    Args:
        words: the rest of the command line; an operator or gate that it names by file or module is listed too.

    Raises:
        ValueError: where that cannot be loaded.
    """
    from ngrpo import models, presets, tasks

    names = {"models": models.PACKAGED, "tasks": tasks.usage(), "presets": presets.available()}
    parts = [_TRAIN.format(**{key: ", ".join(value) for key, value in names.items()})]
    shared = {field.name: field for field in dataclasses.fields(Perturbation)}
    parts.append("options of every operator (the gate)\n" + _table(Perturbation, list(shared.values())))
    for kept, root in _KINDS.items():
        common = shared if kept is registry.operators else {}
        for name, address in _with_named(kept, Flags(words).value(root)).items():
            try:
                cls = kept.get(name)
            except ValueError as error:
                parts.append(f"{name}: cannot be loaded: {error}\n")
                continue
            own = [f for f in dataclasses.fields(cls) if f.name not in common or f.default != common[f.name].default]
            notes = [] if kept is registry.operators else [kept.kind]
            notes += [cls.paper] if hasattr(cls, "paper") else []
            head = f"{name}  ({'; '.join([*notes, _source(kept, name, address)])})"
            parts.append(f"{head}\n  {_first_line(cls)}\n{_table(cls, own, root)}")
    return "\n".join(parts)


def _with_named(kept: Registry, given: str | None) -> dict[str, str]:
    """All that is registered; what the user names by file or module stands last, next to the prompt."""
    known = kept.available()
    if not given or given in known or given.lower() == "none":
        return known
    cls = kept.get(given)
    return {**{name: address for name, address in known.items() if name != cls.name}, given: kept.address(cls)}


def _table(cls: type, fields: list[dataclasses.Field], root: str = "--perturbation") -> str:
    lines = []
    for field in fields:
        accepted = kinds(cls, field.name)
        kind = next(k for k in accepted if k is not type(None))
        limits = allowed(field) or {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")
        if type(None) in accepted:
            limits += ", or none"
        default = "none" if field.default is None else str(field.default).lower() if kind is bool else field.default
        flag = f"  {root}.{field.name}"
        lines.append(f"{flag:<33}{field.metadata.get('help', '')}; {limits} [{default}]")
    return "\n".join(lines) + "\n"


def _source(kept: Registry, name: str, address: str) -> str:
    if address.startswith(kept.tree + "."):
        return "in-tree"
    for point in entry_points(group=kept.group):
        if point.name == name and point.dist is not None:
            return f"package {point.dist.name}"
    return address


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().split("\n", 1)[0]
