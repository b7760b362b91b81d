# SPDX-License-Identifier: Apache-2.0
"""What `ngrpo train --dry-run` prints: configuration, placement, memory, tokens per step, and the checks."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ngrpo.config import parse, rules, run_notes
from ngrpo.config.kinds import KINDS
from ngrpo.config.run import RunConfig
from ngrpo.machine.console.text import text_table
from ngrpo.machine.hardware import gpu_plan, profile_of_run
from ngrpo.machine.hardware.gpu_plan import Part
from ngrpo.machine.models import architecture
from ngrpo.machine.upstream import openrlhf_parser, placement
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.machine.upstream.placement import GIB, Args, Machine
from perturbations.errors import UsageError

Check = tuple[str, Callable[[], str | None]]
"""What is told of a check, and the check: it raises where something is wrong, and returns why it could not look."""
_WIDTH = 78
_WRONG = "WRONG"  # in a line about what cannot work


def dry_run(run: RunConfig, shape: str, *, checks_only: bool = False) -> int:
    """Prints what a run would be, and checks all that needs no GPU; nothing is loaded, kept or asked of the network.

    Args:
        run: what is asked for.
        shape: the GPUs that it is for (`ngrpo.machine.upstream.machine.planned`), or ``true`` for what is at hand.
        checks_only: leave out all but the checks.

    Returns:
        0, or 1 where a check fails or the memory does not suffice.

    Raises:
        UsageError: for flags that make no run.
    """
    planned = placement.planned(shape, parse.DRY_RUN)
    if run.hardware == "auto" and shape.lower() != "true":
        run = replace(run, hardware="cuda")
    run = replace(run, run_dir=run.run_dir or "runs/dry", machine=planned)
    flags = rules.resolve_flags(run)
    rules.check_parsed(flags)
    for note in (*run.notes, *run_notes.notes(flags, run), *rules.notes(flags, run)):
        print(f"warning: {note}")
    if not checks_only:
        print(f"added to OpenRLHF's flags: {shlex.join(rules.preview(Flags((), flags.added), run))}\n")
    checks = rules.outcomes(flags, run)
    return run_checks(checks) if checks_only else show(rules.preview(flags, run), run, planned, checks)


def show(argv: Sequence[str], run: RunConfig, machine: Machine, checks: Sequence[Check]) -> int:
    """Prints what a run would be.

    Args:
        argv: OpenRLHF's flags, complete with what is added for the run and the hardware.
        run: what is asked for.
        machine: the GPUs that it is planned for.
        checks: all that is checked before a run starts, by what is told of it.

    Returns:
        0, or 1 where a check fails or the estimate is of more memory than there is.
    """
    args, cuda = openrlhf_parser.resolved(argv), profile_of_run(run.hardware).name == "cuda"
    print("configuration")
    print(_indented(configuration(args, run)))
    print(f"\nplacement{f' on {machine}' if cuda else ' (a GPU is a share of this CPU here)'}")
    print(_indented(placed(args)))
    print("\nmemory of one GPU in GiB, estimated")
    estimate = memory(args, machine.memory) if cuda else ["no GPU: the models share this machine's memory"]
    print(_indented(estimate))
    print("\ntokens")
    print(_indented(tokens(args)))
    if cuda:
        print(_indented(kv_cache(args, machine.memory)))
    print("\nchecks")
    return max(run_checks(checks), any(_WRONG in line for line in estimate))


def run_checks(checks: Sequence[Check]) -> int:
    """Prints a line for each check, how to fix what is wrong and why something is open; 1 where anything is wrong."""
    wrong = 0
    for label, check in checks:
        try:
            unchecked = check()
        except UsageError as error:
            wrong += 1
            print(textwrap.fill(label, _WIDTH, initial_indent=f"  {_WRONG}  ", subsequent_indent=" " * 9))
            print(textwrap.fill(str(error), _WIDTH, initial_indent=" " * 9, subsequent_indent=" " * 9))
        else:
            state = "ok  " if unchecked is None else "open"
            print(textwrap.fill(label, _WIDTH, initial_indent=f"  {state}   ", subsequent_indent=" " * 9))
            if unchecked is not None:
                print(textwrap.fill(unchecked, _WIDTH, initial_indent=" " * 9, subsequent_indent=" " * 9))
    return int(wrong > 0)


def configuration(args: Args, run: RunConfig) -> list[str]:
    """Our settings in full, and OpenRLHF's arguments where they differ from its defaults."""
    ours = {
        **{kind.flag: run.specs.get(kind.name) for kind in KINDS.values()},
        "--sampling": run.sampling.given() or None,
        "--reproducible": run.reproducible or None,
        "--eval.at_start": run.eval_at_start or None,
        "--report": {"groups": run.report_groups} if run.report_groups else None,
    }
    lines = []
    for name, value in ours.items():
        if isinstance(value, Mapping):
            options = ", ".join(f"{key}={part}" for key, part in value.items() if key not in ("name", "source"))
            title = f"{name} {value.get('name', '')}".rstrip()
            lines += _wrapped(f"{title}: {options}" if options else title)
        elif value is not None:
            lines.append(name)
    lines.append("" if lines else "nothing of ours: stock OpenRLHF and stock vLLM")
    defaults = openrlhf_parser.default_values()
    differing = {key: value for key, value in args.items() if _plain(value) != _plain(defaults.get(key))}
    rows = [(f"--{key}", _text(value), f"[{_text(defaults.get(key))}]") for key, value in sorted(differing.items())]
    return [*lines, *text_table([("OpenRLHF", "value", "[default]"), *rows], left=3)]


def placed(args: Args) -> list[str]:
    """The GPUs and what each holds, and what kind of placement that is."""
    groups = placement.groups(args)
    lines = []
    for group in groups:
        names = []
        for model in group.models:
            if model == placement.ENGINES:
                number, tensor = args["vllm.num_engines"], args["vllm.tensor_parallel_size"]
                model = f"{number} vLLM engine{'s' * (number > 1)} (tensor parallel {tensor})"
            names.append(model)
        lines.append(f"{group.name}: {', '.join(names)}")
    if placement.is_hybrid(args):
        asleep = args["vllm.enable_sleep"]
        kind = (
            f"hybrid: engines and trainer share GPUs, and the engines {'sleep' if asleep else 'stay'} while it trains"
        )
    elif args["train.async_enable"]:
        kind = "asynchronous: engines roll out while the trainer trains"
    else:
        kind = "engines have GPUs of their own, which wait while the trainer trains, and the other way round"
    total = sum(group.gpus for group in groups)
    nodes = args["actor.num_nodes"]
    return [*lines, f"{total} GPU{'s' * (total > 1)}; actor on {nodes} node{'s' * (nodes > 1)}", *_wrapped(kind)]


def memory(args: Args, gpu: float) -> list[str]:
    """The estimate for one GPU of each group, or what is missing to make one."""
    names = gpu_plan.models(args)
    lines = [f"GPU of {gpu / GIB:.3g} GiB; P parameters, D GPUs that share the optimizer"]
    if args["ds.lora.rank"] or args["ds.load_in_4bit"]:
        return _wrapped("not estimated with LoRA or 4-bit weights: fewer parameters are trained, or smaller ones kept")
    for group in placement.groups(args):
        told = set()
        for model in group.models:
            name = names[model]
            size = architecture.size_of(name) if name else None
            if size is None:
                lines += _wrapped(f"{group.name}: {model} not counted: {_unknown(name)}")
            elif not told:
                told.add(name)
                lines += _wrapped(f"{group.name}: {name}, P = {size.parameters:,} ({size.source})")
        parts = gpu_plan.parts_of(group, args, gpu)
        lines += _table(parts, gpu) if parts else []
    return lines


def _unknown(name: str | None) -> str:
    if not name:
        return "none is named"
    return (
        f"the config.json of {name!r} is not here, or transformers does not know its type. Give its folder: --model"
        " FOLDER"
    )


def _table(parts: Sequence[Part], gpu: float) -> list[str]:
    def gib(value: float) -> str:
        return f"{value / GIB:.1f}" if value else "-"

    cells = [(*part.phases, part.host) for part in parts]
    sums = [sum(column) for column in zip(*cells)]
    names = [part.name for part in parts]
    rows = [(name, *map(gib, row)) for name, row in zip([*names, "sum"], [*cells, sums])]
    columns = text_table([("", *gpu_plan.PHASES, "host"), *rows], left=1)
    formulas = ["", *(part.formula for part in parts), ""]
    lines = [f"  {line}  {formula}".rstrip() for line, formula in zip(columns, formulas)]
    most = max(sums[:-1])
    return lines if most <= gpu else [*lines, f"  {_WRONG}: {gib(most)} GiB do not fit into {gib(gpu)}"]


def tokens(args: Args) -> list[str]:
    """What a step draws and trains at most, in OpenRLHF's counting."""
    prompts, group, batch = (
        args[key] for key in ("rollout.batch_size", "rollout.n_samples_per_prompt", "train.batch_size")
    )
    answers, longest = prompts * group, args["rollout.max_new_tokens"] or args["data.max_len"]
    world = placement.world_size(args, "actor") // args["ds.ring_attn_size"] // args["ds.tensor_parallel_size"]
    updates = answers * args["train.max_epochs"] / batch
    lines = [
        f"a step draws {prompts} prompts × {group} answers = {answers} answers of at most {longest} tokens",
        f"at most {answers * longest:,} generated tokens, {answers * args['data.max_len']:,} with their prompts",
        f"updates a step: {answers} answers × {args['train.max_epochs']} epochs / {batch} a batch = {updates:g}",
        f"each GPU trains {batch / world:g} answers an update, {args['train.micro_batch_size']} at a time",
    ]
    return [line for text in lines for line in _wrapped(text)]


def kv_cache(args: Args, gpu: float) -> list[str]:
    """How many answers an engine draws, and how many tokens it can hold."""
    size = architecture.size_of(args["actor.model_name_or_path"] or "")
    if size is None or not args["vllm.num_engines"]:
        return []
    each = math.ceil(args["rollout.batch_size"] * args["rollout.n_samples_per_prompt"] / args["vllm.num_engines"])
    held = gpu_plan.kv_cache_tokens(size, args, gpu)
    return _wrapped(f"an engine draws {each} answers; its KV cache holds at most {held:,} tokens")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH - 2, subsequent_indent="  ", break_long_words=False)


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _plain(value: object) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
