# SPDX-License-Identifier: Apache-2.0
"""The settings of each stretch of a run: one from its start on, and one from each resumption with other settings on."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from ngrpo.config import flag_checks
from ngrpo.config.complete_run import CompleteRun
from ngrpo.config.feature_kinds import MODEL
from ngrpo.config.kinds import of_a_run
from ngrpo.config.run import FILE, RunConfig
from ngrpo.machine.storage.datafiles import contents, read_yaml, texts
from ngrpo.machine.storage.result_folder import read_json, write_json
from perturbations.errors import UsageError

STRETCHES = "stretches.json"
"""Name of the file in a run's folder with the stretches."""
Stretch = dict[str, Any]
"""A stretch as in the file: ``{"first_step": 1, "settings": {"train.seed": "7", ...}}``."""

_CONTENT = "content of "
# Settings of where a run writes, which change no step of it.
_OF_OUTPUT = ("ckpt.", "logger.", "report.")
_REFUSED = {MODEL.removeprefix("--"): "model"} | {kind.flag.removeprefix("--"): kind.name for kind in of_a_run()}
"""Settings that a resumed run must keep, because its checkpoint has their state; and what each setting sets."""


def settings_of(run: RunConfig) -> dict[str, str]:
    """The flags of a run as texts, and the digests of the files that they name."""
    settings = _without_outputs(run.flags())
    # A class of the user's comes with its whole source as an option, which names no file.
    values = [value for name, value in settings.items() if not name.endswith(".source")]
    digests = {f"{_CONTENT}{path}": digest[:12] for path, digest in contents(values).items()}
    return settings | digests


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """A line for each setting that differs.

    The content of a file that only one side names gets no line: the flag that names the file has one.
    """
    lines = []
    for name in dict.fromkeys([*before, *after]):
        if name.startswith(_CONTENT) and not (name in before and name in after):
            continue
        if before.get(name) != after.get(name):
            lines.append(f"{name} {_shown(before.get(name))} → {_shown(after.get(name))}")
    return lines


def of_start(complete: CompleteRun) -> list[Stretch]:
    """The stretches of a run that starts, the last of them its own.

    Raises:
        UsageError: where it resumes a checkpoint of another model, or of another perturbation, advantage and so on.
    """
    settings = settings_of(complete.run)
    step = flag_checks.resumed_step(complete.flags)
    earlier: list[Stretch] = []
    if step:
        earlier = [stretch for stretch in _earlier_stretches(complete) if stretch["first_step"] <= step]
    if not earlier:
        return [{"first_step": 1, "settings": settings}]
    settings_before = earlier[-1]["settings"]
    for name, what in _REFUSED.items():
        was = _comparable(settings_before.get(name))
        now = _comparable(settings.get(name))
        if was != now:
            raise UsageError(
                f"{flag_checks.LOAD}: the checkpoint after step {step} is of a run with {what} {was}, and this run has"
                f" {what} {now}. Give --{name} {was}, or start a new run with another --run-dir."
            )
    if not changes(settings_before, settings):
        return earlier
    return [*earlier, {"first_step": step + 1, "settings": settings}]


def check(complete: CompleteRun) -> None:
    """Raises ``UsageError`` as :func:`of_start`."""
    # Only a resumed run can be refused. Another one is left out because of_start reads the files that flags name.
    if flag_checks.resumed_step(complete.flags):
        of_start(complete)


def notes(complete: CompleteRun) -> Iterator[str]:
    """A warning that names the settings that change where a run is resumed."""
    step = flag_checks.resumed_step(complete.flags)
    if not step:
        return
    stretches = of_start(complete)
    if stretches[-1]["first_step"] == step + 1 and len(stretches) > 1:
        yield f"from step {described(stretches)[-1]}. The summary and the report have the settings of each stretch."


def described(stretches: list[Stretch]) -> list[str]:
    """A line for each stretch after the first: its first step, and the settings that change with it."""
    return [
        f"{after['first_step']} on other settings hold: {', '.join(changes(before['settings'], after['settings']))}"
        for before, after in pairwise(stretches)
    ]


def write(folder: Path, stretches: list[Stretch]) -> None:
    """Writes the file that :func:`read` reads."""
    write_json(folder / STRETCHES, {"stretches": stretches})


def read(folder: Path) -> list[Stretch]:
    """The stretches in a run's folder; none where an older release ran there."""
    return (read_json(folder / STRETCHES) or {}).get("stretches", [])


def _earlier_stretches(complete: CompleteRun) -> list[Stretch]:
    """The stretches before a start: of the run's folder, else of the folder that its checkpoints are in."""
    folders = []
    if complete.run.run_dir:
        folders.append(Path(complete.run.run_dir).expanduser())
    checkpoints = Path(complete.flags.value("--ckpt.path") or ".")
    folders.append(checkpoints.absolute().parent)
    for folder in folders:
        stretches = read(folder)
        if stretches:
            return stretches
        if (folder / FILE).is_file():  # a release before the file of stretches ran in this folder
            lines = read_yaml(str(folder / FILE), flag=flag_checks.LOAD, example="'rollout.batch_size: 64'")
            return [{"first_step": 1, "settings": _without_outputs(lines)}]
    return []


def _without_outputs(lines: Mapping[str, Any]) -> dict[str, str]:
    """The lines of a run's file as texts, without those that say where it writes."""
    return {name: " ".join(texts(value)) for name, value in lines.items() if not name.startswith(_OF_OUTPUT)}


def _comparable(value: str | None) -> str:
    """A setting as two runs compare it: for a folder its absolute path, in whatever way the user wrote it."""
    path = Path(value or "none").expanduser()
    return str(path.resolve()) if path.exists() else value or "none"


def _shown(value: str | None) -> str:
    if value is None:
        return "not given"
    return value if len(value) <= 60 else f"{value[:57]}..."
