# SPDX-License-Identifier: Apache-2.0
"""The output of `ngrpo train --dry-run`: configuration, placement, memory, tokens per step, and the checks."""

import math
import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ngrpo.config import kinds, parse, rules, run_notes
from ngrpo.config.run import SETTINGS, RunConfig
from ngrpo.machine.console import text_table
from ngrpo.machine.hardware import gpu_plan, lora_plan
from ngrpo.machine.models import architecture
from ngrpo.machine.upstream import openrlhf_flags, placement
from perturbations.errors import UsageError

_WIDTH = 78
_WRONG = "WRONG"  # in a line about an error


def dry_run(run: RunConfig, shape: str, *, checks_only: bool = False) -> int:
    """Prints a run, and checks everything that needs no GPU; nothing is loaded, kept or requested from the network.

    Args:
        run: the run.
        shape: the GPUs that it is for (`placement.planned`), or ``true`` for those of this machine or cluster.
        checks_only: leave out all but the checks.

    Returns:
        0, or 1 where a check fails or the memory does not suffice.
    """
    machine = placement.planned(shape, parse.DRY_RUN)
    if run.hardware == "auto" and shape.lower() != "true":
        run = replace(run, hardware="cuda")
    run = replace(run, run_dir=run.run_dir or "runs/dry", machine=machine)
    flags = rules.resolve_flags(run)
    rules.check_parsed(flags)
    for note in (*run.notes, *run_notes.notes(flags, run)):
        print(f"warning: {note}")
    if checks_only:
        return _run_checks(rules.outcomes(flags, run))
    shown = rules.in_run_folder(flags, run)
    print(f"added to OpenRLHF's flags: {shlex.join(shown.added)}\n")
    args = shown.args
    cuda = run.profile.name == "cuda"
    memory = _memory(args, machine.memory) if cuda else ["no GPU: the models share this machine's memory"]
    parts = {
        "configuration": _configuration(args, run),
        f"placement{f' on {machine}' if cuda else ' (a GPU is a share of this CPU here)'}": _placed(args),
        "memory of one GPU in GiB, estimated": memory,
        "tokens": _tokens(args, machine.memory if cuda else None),
    }
    for title, lines in parts.items():
        print(title, *(f"  {line}".rstrip() for line in lines), "", sep="\n")
    print("checks")
    return max(_run_checks(rules.outcomes(flags, run)), any(_WRONG in line for line in memory))


def _run_checks(checks: Iterable[tuple[str, Callable[[], str | None]]]) -> int:
    """Prints a line for each check, with the fix of an error or the reason why it could not look; 1 for any error."""
    failed = 0
    for label, check in checks:
        state = "ok"
        try:
            more = check()
            state = state if more is None else "open"
        except UsageError as error:
            state, more, failed = _WRONG, str(error), 1
        wrap = textwrap.TextWrapper(_WIDTH, initial_indent=f"  {state:7}", subsequent_indent=" " * 9)
        print(wrap.fill(label))
        if more is not None:
            print(textwrap.fill(more, _WIDTH, initial_indent=" " * 9, subsequent_indent=" " * 9))
    return failed


def _configuration(args: placement.Args, run: RunConfig) -> list[str]:
    """Our settings in full, and OpenRLHF's arguments where they differ from its defaults."""
    ours = {
        **{kind.flag: run.specs.get(kind.name) for kind in kinds.KINDS.values()},
        "--sampling": run.sampling.given() or None,
        **{flag: True for flag, entry in SETTINGS.items() if getattr(run, entry.name) is True},
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
    defaults = {action.dest: action.default for action in openrlhf_flags.actions()}
    rows = [("OpenRLHF", "value", "[default]")]
    for key, value in sorted(args.items()):
        if (given := _text(value)) != (default := _text(defaults.get(key))):
            rows.append((f"--{key}", given, f"[{default}]"))
    return [*lines, *text_table(rows, left=3)]


def _placed(args: placement.Args) -> list[str]:
    """The GPUs with the models of each, and the kind of placement."""
    groups = placement.groups(args)
    lines = []
    for group in groups:
        number, tensor = args["vllm.num_engines"], args["vllm.tensor_parallel_size"]
        engines = f"{number} vLLM engine{'s' * (number > 1)} (tensor parallel {tensor})"
        names = [engines if model == placement.ENGINES else model for model in group.models]
        lines.append(f"{group.name}: {', '.join(names)}")
    if placement.is_hybrid(args):
        asleep = "sleep" if args["vllm.enable_sleep"] else "stay"
        kind = f"hybrid: engines and trainer share GPUs, and the engines {asleep} while it trains"
    elif args["train.async_enable"]:
        kind = "asynchronous: engines roll out while the trainer trains"
    else:
        kind = "engines have GPUs of their own, which wait while the trainer trains, and the other way round"
    total, nodes = sum(group.gpus for group in groups), args["actor.num_nodes"]
    return [*lines, f"{total} GPU{'s' * (total > 1)}; actor on {nodes} node{'s' * (nodes > 1)}", *_wrapped(kind)]


def _memory(args: placement.Args, gpu: float) -> list[str]:
    """The estimate for one GPU of each group, or the reason why there is none."""
    names = gpu_plan.models(args)
    lines = [f"GPU of {gpu / placement.GIB:.3g} GiB; P parameters, D GPUs that share the optimizer"]
    if args["ds.load_in_4bit"]:
        return _wrapped("not estimated with 4-bit weights, which are smaller")
    for group in placement.groups(args):
        told = set()
        for model in group.models:
            name = names[model]
            size = architecture.size_of(name) if name else None
            if size is None:
                unknown = f"the config.json of {name!r} is not here, or transformers does not know its type"
                why = f"{unknown}. Give its folder: --model FOLDER"
                lines += _wrapped(f"{group.name}: {model} not counted: {why if name else 'none is named'}")
            elif not told:
                told.add(name)
                lines += _wrapped(f"{group.name}: {name}, P = {size.parameters:,} ({size.source})")
                if args["ds.lora.rank"]:
                    adapters = lora_plan.adapter_parameters(size, args)
                    lines += _wrapped(f"adapters of rank {args['ds.lora.rank']} train A = {adapters:,} beside P")
        if parts := gpu_plan.parts_of(group, args, gpu):
            cells = [(*part.phases, part.host) for part in parts]
            sums = [sum(column) for column in zip(*cells)]
            rows = [(part.name, *map(_gib, row)) for part, row in zip(parts, cells)]
            table = text_table([("", *gpu_plan.PHASES, "host"), *rows, ("sum", *map(_gib, sums))])
            formulas = ["", *(part.formula for part in parts), ""]
            lines += [f"  {line}  {formula}".rstrip() for line, formula in zip(table, formulas)]
            necessary = gpu_plan.needed(group, args, gpu)
            lines.append(
                f"  needed: {_gib(necessary)} GiB, with a KV cache for one response; taken: {_gib(max(sums[:-1]))}"
            )
            if max(sums[:-1]) > gpu:
                lines.append(f"  {_WRONG}: {_gib(max(sums[:-1]))} GiB do not fit into {_gib(gpu)}")
    return lines


def _gib(value: float) -> str:
    return f"{value / placement.GIB:.1f}" if value else "-"


def _tokens(args: placement.Args, gpu: float | None) -> list[str]:
    """The most that a step draws and trains, in OpenRLHF's counting, and that an engine holds on a GPU."""
    sizes = ("rollout.batch_size", "rollout.n_samples_per_prompt", "train.batch_size")
    prompts, group, batch = (args[name] for name in sizes)
    responses, longest = prompts * group, args["rollout.max_new_tokens"] or args["data.max_len"]
    world = placement.world_size(args, "actor") // args["ds.ring_attn_size"] // args["ds.tensor_parallel_size"]
    updates = responses * args["train.max_epochs"] / batch
    lines = [
        f"a step draws {prompts} prompts × {group} responses = {responses} responses of at most {longest} tokens",
        f"at most {responses * longest:,} generated tokens, {responses * args['data.max_len']:,} with their prompts",
        f"updates a step: {responses} responses × {args['train.max_epochs']} epochs / {batch} a batch = {updates:g}",
        f"each GPU trains {batch / max(world, 1):g} responses an update, {args['train.micro_batch_size']} at a time",
    ]
    size, engines = architecture.size_of(args["actor.model_name_or_path"] or ""), args["vllm.num_engines"]
    if gpu and size and engines:
        each, held = math.ceil(responses / engines), gpu_plan.kv_cache_tokens(size, args, gpu)
        lines.append(f"an engine draws {each} responses; its KV cache holds at most {held:,} tokens")
    return [line for text in lines for line in _wrapped(text)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH - 2, subsequent_indent="  ", break_long_words=False)


def _text(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
