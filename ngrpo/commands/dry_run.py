# SPDX-License-Identifier: Apache-2.0
"""The output of `ngrpo train --dry-run`: configuration, placement, memory, tokens per step, and the checks."""

import math
import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ngrpo.config import complete_run, kinds, parse, rules, run_notes
from ngrpo.config.complete_run import CompleteRun
from ngrpo.config.run import SETTINGS, RunConfig
from ngrpo.machine.colors import colored, state_column
from ngrpo.machine.console import hanging, help_entry, text_table
from ngrpo.machine.hardware import gpu_plan, lora_plan
from ngrpo.machine.models import architecture
from ngrpo.machine.upstream import openrlhf_flags, placement
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations import user_files
from perturbations.errors import UsageError

_WIDTH = 100
_WRONG = "WRONG"  # in each line about an error
_INDENT = " " * 9  # of the lines below a check's first one
_MOST_FLAG_COLUMNS = 48  # an added flag that is longer has its reason on the next line
_MOST_VALUE_COLUMNS = 28  # a value that is longer does not widen the column of values


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
    run_dir = Path(run.run_dir or "runs/dry").expanduser()
    run = replace(run, run_dir=str(run_dir), machine=machine)
    complete = complete_run.make(run)
    rules.check_parsed(complete)
    for note in (*run.notes, *run_notes.all_notes(complete)):
        print(f"{colored('warning', 'yellow')}: {hanging(note, _INDENT, width=_WIDTH)}")
    if checks_only:
        return _run_checks(rules.dry_run_checks(complete))

    as_started = complete.with_task_in_run_folder()
    _print_section("added to OpenRLHF's flags", _added(as_started))
    args = as_started.args
    _print_section("configuration", _configuration(args, run))
    if run.profile.name == "cuda":
        place = f"on {machine}"
        gpu_memory = machine.memory
        memory = _memory(args, gpu_memory)
    else:
        place = "(a GPU is a share of this CPU here)"
        gpu_memory = None
        memory = ["no GPU: the models share this machine's memory"]
    _print_section(f"placement {place}", _placement(args))
    _print_section("memory of one GPU in GiB, estimated", memory)
    _print_section("tokens", _tokens(args, gpu_memory))
    print(colored("checks", "bold"))
    failed = _run_checks(rules.dry_run_checks(complete))
    too_large = any(_WRONG in line for line in memory)
    return 1 if failed or too_large else 0


def _print_section(title: str, lines: Iterable[str]) -> None:
    print(colored(title, "bold"))
    for line in lines:
        print(f"  {line}".rstrip())
    print()


def _run_checks(checks: Iterable[tuple[str, Callable[[], str | None]]]) -> int:
    """Prints a line for each check, with the fix of an error or the reason why the check could not be made.

    Returns 1 where a check is an error, else 0.
    """
    failed = 0
    for label, check in checks:
        try:
            detail = check()
            state = "ok" if detail is None else "open"
        except UsageError as error:
            detail = str(error)
            state = _WRONG
            failed = 1
        print(f"  {state_column(state, 7)}{hanging(label, _INDENT, width=_WIDTH)}")
        if detail is not None:
            print(f"{_INDENT}{hanging(detail, _INDENT, width=_WIDTH)}")
    return failed


def _added(complete: CompleteRun) -> list[str]:
    """A row for each flag that ngrpo adds: the flag with its value, and why; a long flag has its reason below it."""
    rows = []
    for flag in Flags(complete.flags.added):
        rows.append((shlex.join(flag.argv), complete.reasons[flag.name]))
    if not rows:
        return ["none"]
    fitting = [len(words) for words, _ in rows if len(words) <= _MOST_FLAG_COLUMNS]
    column = max(fitting, default=0) + 2
    lines: list[str] = []
    for words, why in rows:
        lines += help_entry(words, why, column=column, width=_WIDTH - 2)
    return lines


def _configuration(args: placement.Args, run: RunConfig) -> list[str]:
    """Our settings in full, and OpenRLHF's arguments where they differ from its defaults."""
    lines = []
    for kind in kinds.KINDS.values():
        spec = run.specs.get(kind.name)
        if spec is not None:
            lines += _with_options(kind.flag, spec)
    sampling = run.sampling.given()
    if sampling:
        lines += _with_options("--sampling", sampling)
    lines += [flag for flag, setting in SETTINGS.items() if getattr(run, setting.name) is True]
    if run.report_groups:
        lines += _with_options("--report", {"groups": run.report_groups})
    lines.append("" if lines else "nothing of ours: stock OpenRLHF and stock vLLM")

    defaults = {action.dest: action.default for action in openrlhf_flags.actions()}
    rows = [("OpenRLHF", "value", "[default]")]
    for key, value in sorted(args.items()):
        text = _text(value)
        default = _text(defaults.get(key))
        if text != default:
            rows.append((f"--{key}", text, f"[{default}]"))
    flag_width = max(len(flag) for flag, _, _ in rows)
    # A long value, such as a path, moves the default of its own row only.
    value_width = max(len(value) for _, value, _ in rows if len(value) <= _MOST_VALUE_COLUMNS)
    lines += [f"{flag:<{flag_width}}  {value:<{value_width}}  {default}" for flag, value, default in rows]
    return lines


def _with_options(flag: str, spec: Mapping[str, Any]) -> list[str]:
    """A flag of ours, the name that it has, and its options."""
    title = f"{flag} {spec.get('name', '')}".rstrip()
    options = user_files.options_in_words(spec)
    return _wrapped(f"{title}: {', '.join(options)}" if options else title)


def _placement(args: placement.Args) -> list[str]:
    """The GPUs with the models of each, and the kind of placement."""
    groups = placement.groups(args)
    engines = (
        f"{_plural(args['vllm.num_engines'], 'vLLM engine')} (tensor parallel {args['vllm.tensor_parallel_size']})"
    )
    lines = []
    for group in groups:
        names = [engines if model == placement.ENGINES else model for model in group.models]
        lines.append(f"{group.name}: {', '.join(names)}")
    total = sum(group.gpus for group in groups)
    lines.append(f"{_plural(total, 'GPU')}; actor on {_plural(args['actor.num_nodes'], 'node')}")
    if placement.is_hybrid(args):
        asleep = "sleep" if args["vllm.enable_sleep"] else "stay"
        kind = f"hybrid: engines and trainer share GPUs, and the engines {asleep} while it trains"
    elif args["train.async_enable"]:
        kind = "asynchronous: engines roll out while the trainer trains"
    else:
        kind = "engines have GPUs of their own, which wait while the trainer trains, and the other way round"
    return [*lines, *_wrapped(kind)]


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}s" if number > 1 else f"{number} {noun}"


def _memory(args: placement.Args, gpu: float) -> list[str]:
    """The estimate for one GPU of ``gpu`` bytes of each group, or the reason why there is none."""
    lines = [f"GPU of {gpu / placement.GIB:.3g} GiB; P parameters, D GPUs that share the optimizer"]
    for group in placement.groups(args):
        lines += _sizes(group, args)
        lines += _memory_table(group, args, gpu)
    return lines


def _sizes(group: placement.Group, args: placement.Args) -> list[str]:
    """The number of parameters of each model on a group's GPUs, or why a model is not counted."""
    names = gpu_plan.models(args)
    lines = []
    size_is_shown = False
    for model in group.models:
        name = names[model]
        if not name:
            lines += _wrapped(f"{group.name}: {model} not counted: none is named")
            continue
        size = architecture.size_of(name)
        if size is None:
            lines += _wrapped(
                f"{group.name}: {model} not counted: the config.json of {name!r} is not here, or transformers does not"
                " know its type. Give its folder: --model FOLDER"
            )
        elif not size_is_shown:
            size_is_shown = True
            lines += _wrapped(f"{group.name}: {name}, P = {size.parameters:,} ({size.source})")
            if args["ds.lora.rank"]:
                trained = lora_plan.adapter_parameters(size, args)
                lines += _wrapped(f"adapters of rank {args['ds.lora.rank']} train A = {trained:,} beside P")
            if args["ds.load_in_4bit"]:
                lines += _wrapped(f"Q = {lora_plan.four_bit_parameters(size):,} of P are stored in 4 bits")
    return lines


def _memory_table(group: placement.Group, args: placement.Args, gpu: float) -> list[str]:
    """What one GPU of a group holds in each phase, with the formulas; nothing where no model's size is known."""
    components = gpu_plan.parts_of(group, args, gpu)
    if not components:
        return []
    sums = [sum(phase) for phase in zip(*(component.phases for component in components))]
    host = sum(component.host for component in components)
    rows: list[Sequence[str]] = [("", *gpu_plan.PHASES, "host")]
    rows += [(component.name, *map(_gib, component.phases), _gib(component.host)) for component in components]
    rows.append(("sum", *map(_gib, sums), _gib(host)))
    formulas = ["", *(component.formula for component in components), ""]
    lines = []
    for row, formula in zip(text_table(rows), formulas):
        line = f"  {row}  {formula}".rstrip()
        if len(line) <= _WIDTH - 2:
            lines.append(line)
        else:
            lines += [f"  {row}", f"    = {formula}"]

    needed = gpu_plan.needed(group, args, gpu)
    peak = max(sums)
    lines.append(f"  needed: {_gib(needed)} GiB, with a KV cache for one response; taken: {_gib(peak)}")
    if peak > gpu:
        lines.append(f"  {_WRONG}: {_gib(peak)} GiB do not fit into {_gib(gpu)}")
    return lines


def _gib(value: float) -> str:
    return f"{value / placement.GIB:.1f}" if value else "-"


def _tokens(args: placement.Args, gpu: float | None) -> list[str]:
    """The most that a step draws and trains, in OpenRLHF's counting, and that an engine holds on a GPU."""
    prompts = args["rollout.batch_size"]
    group = args["rollout.n_samples_per_prompt"]
    batch = args["train.batch_size"]
    epochs = args["train.max_epochs"]
    longest = args["rollout.max_new_tokens"] or args["data.max_len"]
    responses = prompts * group
    ranks = placement.world_size(args, "actor") // args["ds.ring_attn_size"] // args["ds.tensor_parallel_size"]
    updates = responses * epochs / batch
    texts = [
        f"a step draws {prompts} prompts × {group} responses = {responses} responses of at most {longest} tokens",
        f"at most {responses * longest:,} generated tokens, {responses * args['data.max_len']:,} with their prompts",
        f"updates a step: {responses} responses × {epochs} epochs / {batch} a batch = {updates:g}",
        f"each GPU trains {batch / max(ranks, 1):g} responses an update, {args['train.micro_batch_size']} at a time",
    ]
    size = architecture.size_of(args["actor.model_name_or_path"] or "")
    engines = args["vllm.num_engines"]
    if gpu and size and engines:
        drawn = math.ceil(responses / engines)
        cached = gpu_plan.kv_cache_tokens(size, args, gpu)
        texts.append(f"an engine draws {drawn} responses; its KV cache holds at most {cached:,} tokens")
    return [line for text in texts for line in _wrapped(text)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH - 2, subsequent_indent="  ", break_long_words=False)


def _text(value: object) -> str:
    """An argument of OpenRLHF as its command line has it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value))
    return str(value)
