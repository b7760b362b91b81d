"""What the registry holds, as text: `ngrpo list` and `ngrpo train --help`."""

from __future__ import annotations

import dataclasses
from importlib.metadata import entry_points

from perturbations import registry
from perturbations.base import Perturbation
from perturbations.options import allowed, kinds

_TREE = "perturbations.strategies."

_TRAIN = """\
usage: ngrpo train [--perturbation NAME] [--perturbation.<option> VALUE ...] [flags of OpenRLHF ...]

Runs OpenRLHF's train_ppo_ray with perturbed rollouts. Our flags stand below; every other word goes to
OpenRLHF untouched. Its own help: ngrpo train --openrlhf-help

  --perturbation NAME            an operator, or package.module:Name of your own   [none: stock OpenRLHF]
  --perturbation.<option> VALUE  an option of the operator, see below; a switch may stand alone
  --perturbation.config FILE     YAML with the same options and 'name'; a flag overrides the file
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


def listing() -> str:
    """One line per operator: name, source, paper, what it does."""
    rows = [("name", "source", "paper", "")]
    for name, address in registry.available().items():
        try:
            cls = registry.get(name)
        except ValueError as error:
            rows.append((name, _source(name, address), "cannot be loaded", str(error)))
            continue
        rows.append((name, _source(name, address), getattr(cls, "paper", "-"), _first_line(cls)))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[3]]).rstrip() for row in rows)


def train_help() -> str:
    """The help of ``ngrpo train``: our flags, then every operator with its options."""
    from ngrpo import models, tasks

    parts = [_TRAIN.format(models=", ".join(models.PACKAGED), tasks=", ".join(tasks.available()))]
    shared = {field.name: field for field in dataclasses.fields(Perturbation)}
    parts.append("options of every operator (the gate)\n" + _table(Perturbation, list(shared.values())))
    for name, address in registry.available().items():
        try:
            cls = registry.get(name)
        except ValueError as error:
            parts.append(f"{name}: cannot be loaded: {error}\n")
            continue
        own = [f for f in dataclasses.fields(cls) if f.name not in shared or f.default != shared[f.name].default]
        head = f"{name}  ({getattr(cls, 'paper', 'no paper named')}; {_source(name, address)})"
        parts.append(f"{head}\n  {_first_line(cls)}\n{_table(cls, own)}")
    return "\n".join(parts)


def _table(cls: type, fields: list[dataclasses.Field]) -> str:
    lines = []
    for field in fields:
        accepted = kinds(cls, field.name)
        kind = next(k for k in accepted if k is not type(None))
        limits = allowed(field) or {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")
        if type(None) in accepted:
            limits += ", or none"
        default = "none" if field.default is None else str(field.default).lower() if kind is bool else field.default
        flag = f"  --perturbation.{field.name}"
        lines.append(f"{flag:<33}{field.metadata.get('help', '')}; {limits} [{default}]")
    return "\n".join(lines) + "\n"


def _source(name: str, address: str) -> str:
    if address.startswith(_TREE):
        return "in-tree"
    for point in entry_points(group=registry.ENTRY_POINT_GROUP):
        if point.name == name and point.dist is not None:
            return f"package {point.dist.name}"
    return address


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().split("\n", 1)[0]
