# SPDX-License-Identifier: Apache-2.0
"""The settings of each stretch of a run: one from its start on, and one from each resumption with other settings on."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from ngrpo.config import flag_checks
from ngrpo.config.features import MODEL
from ngrpo.config.kinds import of_a_run
from ngrpo.config.run import FILE, RunConfig
from ngrpo.machine.storage.datafiles import contents, read_yaml, texts
from ngrpo.machine.storage.result_folder import read_json, write_json
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError

STRETCHES = "stretches.json"
"""Name of the file in a run's folder with the stretches, each ``{"first_step": 1, "settings": {...}}``."""
Stretch = dict[str, Any]
_CONTENT = "content of "
# They say where a run writes, and change no step of it.
_OF_OUTPUT = ("ckpt.", "logger.", "report.")
_REFUSED = {MODEL.removeprefix("--"): "model"} | {kind.flag.removeprefix("--"): kind.name for kind in of_a_run()}
"""Settings of which a checkpoint holds a state, and what each sets."""


def settings_of(run: RunConfig) -> dict[str, str]:
    """The flags of a run as texts, and the digests of the files that they name."""
    settings = {name: " ".join(texts(value)) for name, value in run.flags().items() if not name.startswith(_OF_OUTPUT)}
    digests = contents(value for name, value in settings.items() if not name.endswith(".source"))
    return settings | {f"{_CONTENT}{path}": digest[:12] for path, digest in digests.items()}


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """A line for each setting that differs; of a file that one side alone names, its flag is the change."""
    lines = []
    for name in dict.fromkeys([*before, *after]):
        if name.startswith(_CONTENT) and not (name in before and name in after):
            continue
        if before.get(name) != after.get(name):
            lines.append(f"{name} {_shown(before.get(name))} → {_shown(after.get(name))}")
    return lines


def of_start(flags: Flags, run: RunConfig) -> list[Stretch]:
    """The stretches of a run that starts with complete flags, the last of them its own.

    Raises:
        UsageError: where it resumes a checkpoint of another model, or of another perturbation, advantage and so on.
    """
    settings = settings_of(run)
    step = flag_checks.resumed_step(flags)
    before = [stretch for stretch in _kept(flags, run) if stretch["first_step"] <= step] if step else []
    if not before:
        return [{"first_step": 1, "settings": settings}]
    last = before[-1]["settings"]
    for name, what in _REFUSED.items():
        was = _named(last.get(name))
        now = _named(settings.get(name))
        if was != now:
            raise UsageError(
                f"{flag_checks.LOAD}: the checkpoint after step {step} is of a run with {what} {was}, and this run has"
                f" {what} {now}. Give --{name} {was}, or start a new run with another --run-dir."
            )
    return [*before, {"first_step": step + 1, "settings": settings}] if changes(last, settings) else before


def check(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` as :func:`of_start`."""
    if flag_checks.resumed_step(flags):  # nothing else is refused, and the settings of a start read whole files
        of_start(flags, run)


def notes(flags: Flags, run: RunConfig) -> Iterator[str]:
    """A warning that names the settings that change where a run is resumed."""
    step = flag_checks.resumed_step(flags)
    if not step:
        return
    stretches = of_start(flags, run)
    if stretches[-1]["first_step"] == step + 1 and len(stretches) > 1:
        yield f"from step {described(stretches)[-1]}. The summary and the report have the settings of each stretch."


def described(stretches: list[Stretch]) -> list[str]:
    """A line for each stretch after the first: its first step, and the settings that change there."""
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


def _kept(flags: Flags, run: RunConfig) -> list[Stretch]:
    """The stretches before a start: of the run's folder, else of the folder that its checkpoints are in."""
    folders = [Path(run.run_dir or "").expanduser()] if run.run_dir else []
    for folder in [*folders, Path(flags.value("--ckpt.path") or ".").absolute().parent]:
        if stretches := read(folder):
            return stretches
        if (folder / FILE).is_file():  # written by a release without the file of stretches
            lines = read_yaml(str(folder / FILE), flag=flag_checks.LOAD, example="'rollout.batch_size: 64'")
            settings = {
                name: " ".join(texts(value)) for name, value in lines.items() if not name.startswith(_OF_OUTPUT)
            }
            return [{"first_step": 1, "settings": settings}]
    return []


def _named(value: str | None) -> str:
    """A name for comparison: that of a folder whole, whatever way it was written."""
    path = Path(value or "none").expanduser()
    return str(path.resolve()) if path.exists() else value or "none"


def _shown(value: str | None) -> str:
    if value is None:
        return "not given"
    return value if len(value) <= 60 else f"{value[:57]}..."
