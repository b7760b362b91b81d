# SPDX-License-Identifier: Apache-2.0
"""A run's `summary.json`, and its table at the end of the run."""

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ngrpo.config import complete_run, parse, stretches
from ngrpo.config.flag_checks import LOAD
from ngrpo.config.kinds import run_level_kinds
from ngrpo.config.run import FILE, RunConfig
from ngrpo.machine.console import text_table
from ngrpo.machine.storage.datafiles import Series, event_files, read_scalars, read_texts
from ngrpo.machine.storage.result_folder import ResultFolder, read_json, write_json
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.machine.upstream.versions import machine, recorded_versions
from ngrpo.trainers.openrlhf import kept_groups
from ngrpo.workbench.report.values import first_and_last
from perturbations import registry, user_files
from perturbations.errors import UsageError

NO_STEP = "no training step was logged: the training's output says why (docs/troubleshooting.md)."
ALL_FILTERED = (
    "no training step was logged: all prompts were filtered out, because the mean score of every group was outside"
    " --algo.dynamic_filtering_range."
)
_LOGS = "event_files.json"
_PREFIX = "train/"
_PERTURBATION = "perturbation/"
# Groups of metrics whose slash becomes an underscore in summary.json: `advantage/mean` is `advantage_mean`.
_GROUPED = (
    "advantage/",
    "credit/",
    "importance/",
    "policy_noise/",
    "sampling/",
    "score_centering/",
    "second_round/",
    "task/",
)
_TRAINED = ("trained_groups", "trained_responses", "optimizer_steps")
# group_reward_std is OpenRLHF's mean over groups: 0 where none has anything to learn.
_AS_LOGGED = ("group_reward_std", *_TRAINED, "cut_prompts", "cut_turns")
_MOST_ROWS = 14
_SAMPLES = "train/generated_samples"
# As OpenRLHF 0.11.2 writes a step's sample: with a backslash and an n for its own line breaks.
_LOGGED_SAMPLE = re.compile(r"Sample:\\n(?P<text>.*)\\n\\nReward: (?P<reward>-?[\d.]+)", re.DOTALL)
_MOST_SAMPLES = 6
_MOST_CHARACTERS = 3_000  # of a sample
# Releases up to 0.1 logged a metric under another name; their logs are still read.
_OLD_NAMES = {"anchor_agreement": "sampled_token_kept"}


class Column(NamedTuple):
    """A column of the table on the screen: heading, key in a step, and format."""

    heading: str
    key: str
    form: str


_STEP = Column("step", "step", ".0f")
_COLUMNS = (
    Column("reward", "reward", ".3f"),
    Column("rate", "rate", ".3f"),
    Column("token replaced", "sampled_token_replaced", ".3f"),
    Column("shift", "shift", ".3f"),
    Column("gap perturbed", "gap_perturbed_mean", ".1e"),
    Column("max", "gap_perturbed_max", ".1e"),
    Column("gap plain", "gap_plain_mean", ".1e"),
    Column("max", "gap_plain_max", ".1e"),
    Column("tokens/s", "tokens_per_second", ".0f"),
    Column("s/step", "step_seconds", ".1f"),
)


def note_logs(folder: Path, run: RunConfig) -> None:
    """Writes down which logs are there when a run starts.

    A new run leaves them out, and a resumed one continues them. Times of files do not tell: the clocks of the nodes
    that write them, of their file server and of this machine differ.
    """
    flags = Flags(run.openrlhf)
    present = event_files(log_folder(folder, flags))
    if flags.has(LOAD):
        earlier = _noted(folder)
        noted = {"left_out": earlier["left_out"], "in_order": _in_order(present, earlier)}
    else:
        noted = {"left_out": present, "in_order": []}
    write_json(folder / _LOGS, noted)


def _noted(folder: Path) -> dict[str, list[str]]:
    """What :func:`note_logs` wrote last: logs of other runs, and logs of this one in the order of its starts."""
    return read_json(folder / _LOGS) or {"left_out": [], "in_order": []}


def _in_order(present: list[str], noted: Mapping[str, list[str]]) -> list[str]:
    """The logs of a run: those of its earlier starts in their order, then those that have appeared since."""
    earlier = [name for name in noted["in_order"] if name in present]
    new = [name for name in present if name not in earlier and name not in noted["left_out"]]
    return earlier + new


def finish(folder: Path, run: RunConfig, *, began: float, ended: float | None = None, stopped: bool = False) -> str:
    """Writes ``summary.json`` of a run that has ended; nothing for one that was stopped before its first step.

    Args:
        folder: the run's folder, in which :func:`note_logs` was called at the start.
        run: as it was started.
        began: Unix time of the start.
        ended: Unix time of the end; None for now.

    Returns:
        The table for the screen; empty where nothing was written.
    """
    ended = time.time() if ended is None else ended
    flags = Flags(run.openrlhf)
    log = log_folder(folder, flags)
    logs = _in_order(event_files(log), _noted(folder))
    scalars = read_scalars(log, logs)
    if stopped and not steps(scalars):
        return ""
    file = folder / "summary.json"
    summary: dict[str, Any] = {
        "format": 1,
        **run.methods,
        "stretches": stretches.read(folder),
        "sampling": run.sampling.described(flags),
        "reproducible": run.reproducible,
        "replay_routing": run.replay_routing,
        "steps": steps(scalars),
        "evaluation": {tag: values for tag, values in scalars.items() if tag.startswith("eval/")},
        "seconds": round(ended - began, 1),
        "seed": int(flags.or_default("--train.seed")),
        "hardware": run.hardware,
        "machine": machine(),
        "versions": recorded_versions(),
        "places": {
            "checkpoint": flags.value("--ckpt.output_dir"),
            "tensorboard": str(log),
            "summary": str(file),
            "report": str(folder / "report.html"),
        },
        "openrlhf_args": list(run.openrlhf),
        "groups": kept_groups.read(folder) if run.report_groups else [],
        "samples": samples(read_texts(log, logs, _SAMPLES)),
        "scalars": scalars,
    }
    write_json(file, summary)
    return table(summary)


def log_folder(folder: Path, flags: Flags) -> Path:
    """Where a run with these flags logs its steps."""
    return Path(flags.value("--logger.tensorboard_dir") or folder / "tensorboard")


def write_again(folder: Path) -> None:
    """Writes the summary of a run from its ``run.yaml`` and its logs, as after a disk that was full at its end.

    Raises:
        UsageError: for a folder in which a command is at work, and for a run without a step.
    """
    with ResultFolder.opened(folder):
        words = parse.with_files([parse.CONFIG_FILE, str(folder / FILE), "--run-dir", str(folder)])
        from_file = parse.run_config(words)
        complete = complete_run.make_algorithm(from_file)
        run = complete.to_run()
        began = (folder / FILE).stat().st_mtime  # a start writes the file
        logs = log_folder(folder, complete.flags).rglob("events*")
        ended = max((log.stat().st_mtime for log in logs), default=began)
        if not finish(folder, run, began=began, ended=ended, stopped=True):
            raise UsageError(f"{folder}: its run logged no training step, so that there is nothing to report.")


def steps(scalars: Series) -> list[dict[str, float]]:
    """One row per training step, with the keys that were logged for it.

    ``tokens_per_second`` divides the generated tokens by the generation's time; ``sampled_token_replaced`` is the share
    of perturbed positions whose text has another token than the sampled one.
    """
    train = {tag.removeprefix(_PREFIX): values for tag, values in scalars.items() if tag.startswith(_PREFIX)}
    rows = []
    for step, reward in train.get("rollout/reward_mean", {}).items():
        logged = {tag: values[step] for tag, values in train.items() if step in values}
        row: dict[str, float] = {"step": step, "reward": reward}
        for tag, value in logged.items():
            if tag.startswith(_GROUPED):
                row[tag.replace("/", "_")] = value
            elif tag.startswith(_PERTURBATION):
                name = tag.removeprefix(_PERTURBATION)
                row[_OLD_NAMES.get(name, name)] = value
            elif tag in _AS_LOGGED:
                row[tag] = value
        if "sampled_token_kept" in row:
            row["sampled_token_replaced"] = 1.0 - row["sampled_token_kept"]
        seconds = logged.get("timing/generation", 0.0)
        tokens = logged.get("generated_tokens")
        if seconds > 0.0 and tokens is not None:
            row["tokens_per_second"] = tokens / seconds
        if "timing/step_total" in logged:
            row["step_seconds"] = logged["timing/step_total"]
        rows.append(row)
    return rows


def samples(texts: Mapping[int, str]) -> list[dict[str, Any]]:
    """The samples that OpenRLHF logged, one of a step: ``step``, ``reward`` and ``text``, prompt and response.

    At most :data:`_MOST_SAMPLES` steps are kept, evenly spread, with the first and the last one.
    """
    rows = []
    for step, logged in texts.items():
        sample = _LOGGED_SAMPLE.fullmatch(logged)
        if sample is not None:
            text = sample["text"]
            cut = len(text) - _MOST_CHARACTERS
            if cut > 0:  # the prompt is at the beginning, and the response at the end
                half = _MOST_CHARACTERS // 2
                text = f"{text[:half]}\n[… {cut:,} characters …]\n{text[-half:]}"
            rows.append({"step": step, "reward": float(sample["reward"]), "text": text})
    if len(rows) <= _MOST_SAMPLES:
        return rows
    spacing = (len(rows) - 1) / (_MOST_SAMPLES - 1)
    return [rows[round(number * spacing)] for number in range(_MOST_SAMPLES)]


def table(summary: Mapping[str, Any]) -> str:
    """The summary for the screen: one line per step (thinned where there are many), then where everything is."""
    rows = summary["steps"]
    lines = ["", f"perturbation  {_describe(summary['perturbation'])}"]
    for kind in run_level_kinds():
        if summary.get(kind.name):
            lines.append(f"{kind.name:<13} {_words(summary[kind.name])}")
    if rows:
        lines += ["", *_step_table(rows)]
        lines += ["", *_figures(rows, summary["evaluation"])]
    else:
        filters = Flags(summary["openrlhf_args"]).has("--algo.dynamic_filtering_enable")
        lines += ["", ALL_FILTERED if filters else NO_STEP]
    lines += [f"settings      from step {line}" for line in stretches.described(summary["stretches"])]
    lines.append(f"run           {summary['seconds']:.0f} s on {summary['hardware']}, seed {summary['seed']}")
    for name in ("checkpoint", "TensorBoard", "summary", "report"):
        lines.append(f"{name:<13} {summary['places'][name.lower()]}")
    return "\n".join(lines)


def _step_table(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """The steps as aligned columns: evenly spread where there are many, always with the last one."""
    stride = -(-len(rows) // _MOST_ROWS)
    shown = list(rows[::stride])
    if shown[-1] is not rows[-1]:
        shown.append(rows[-1])
    columns = [_STEP, *(column for column in _COLUMNS if any(column.key in row for row in shown))]
    cells = [[column.heading for column in columns]]
    for row in shown:
        cells.append([f"{row[column.key]:{column.form}}" if column.key in row else "-" for column in columns])
    return text_table(cells, left=0)


def _describe(spec: Mapping[str, Any] | None) -> str:
    """Name, rate, the gate's options, and the options that are not at their defaults."""
    if spec is None:
        return "none (stock vLLM rollouts)"
    cls = registry.get(spec["name"], spec.get("source"))
    at_default = {field.name: field.default for field in dataclasses.fields(cls)}
    options = {key: value for key, value in spec.items() if key == "rate" or at_default.get(key) != value}
    return _words({**options, "name": spec["name"]})


def _words(spec: Mapping[str, Any]) -> str:
    """A method's name and options, without the text of its file."""
    return " ".join([str(spec["name"]), *user_files.options_in_words(spec)])


def _figures(rows: list[dict[str, float]], evaluation: Series) -> list[str]:
    lines = [f"reward        {rows[0]['reward']:.3f} → {rows[-1]['reward']:.3f}"]
    pass_1 = sorted(tag for tag in evaluation if tag.endswith("_pass1"))  # step 0 is before the training
    for tag in pass_1:
        lines.append(f"evaluation    {first_and_last(evaluation[tag])}, {tag.rpartition('/')[2]}")
    if any("trained_groups" in row for row in rows):
        groups, responses, updates = (_total(rows, key) for key in _TRAINED)
        lines.append(f"trained       {groups:g} groups, {responses:g} responses, {updates:g} optimizer steps")
    cut_prompts = _total(rows, "cut_prompts")
    if cut_prompts:
        lines.append(f"cut prompts   {cut_prompts:g} lost their first tokens: --data.max_len is too small for them")
    cut_turns = _total(rows, "cut_turns")
    if cut_turns:
        lines.append(f"cut turns     {cut_turns:g} conversations ended early: --data.max_len is too small for them")
    mismatches = [row[key] for row in rows for key in ("gap_perturbed_max", "gap_plain_max") if key in row]
    if mismatches:
        lines.append(
            f"replay        largest difference of rollout and trainer: {max(mismatches):.1e} in log π of a token"
        )
    sizes = [row["record_bytes_per_token"] for row in rows if "record_bytes_per_token" in row]
    if sizes:
        lines.append(f"records       {sum(sizes) / len(sizes):.2f} bytes per generated token")
    return lines


def _total(rows: Sequence[Mapping[str, float]], key: str) -> float:
    return sum(row.get(key, 0.0) for row in rows)
