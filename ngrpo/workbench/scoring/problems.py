# SPDX-License-Identifier: Apache-2.0
"""Problems from benchmarks by name, files, hub datasets and tasks."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

from ngrpo.machine.models.packaged import HUB_SECONDS
from ngrpo.machine.storage.datafiles import ENDINGS, Row, read_rows
from ngrpo.workbench.scoring import scorer_names
from ngrpo.workbench.scoring.layouts import Asked, layout_of
from ngrpo.workbench.scoring.problem import Problem
from perturbations.errors import UsageError
from perturbations.options import nearest

# Datasets of the papers by short name; their columns are those of layouts.py.
BENCHMARKS = {
    "deepscaler": "agentica-org/DeepScaleR-Preview-Dataset@train",  # problem, answer; 40,315 rows, for training
    "aime2024": "HuggingFaceH4/aime_2024@train",  # problem, answer; 30 rows
    "aime2025": "math-ai/aime25@test",  # problem, answer; 30 rows
    "amc23": "math-ai/amc23@test",  # question, answer; 40 rows
    "math500": "HuggingFaceH4/MATH-500@test",  # problem, answer; 500 rows
    "gpqa_diamond": "Idavidrein/gpqa:gpqa_diamond@train",  # GPQA's columns; 198 rows; gated
}
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.-]+))?")
# The split to take where none is named; one with a reference is meant, and a test set before the rest.
_SPLITS = ("test", "validation", "train")


def load_problems(
    source: str,
    *,
    input_key: str = "input",
    label_key: str = "label",
    scorer: str = "auto",
    limit: int | None = None,
    split: str | None = None,
    instruction: str | None = None,
    skip_unanswered: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> list[Problem]:
    """Reads problems.

    Args:
        source: a name of :data:`BENCHMARKS`, a JSONL, JSON, CSV or parquet file, or a hub dataset
            ``owner/name[:config][@split]``.
        input_key: column of prompts in OpenRLHF's layout.
        label_key: column of references in OpenRLHF's layout.
        scorer: ``auto`` (by layout), or one of :func:`ngrpo.workbench.evaluate.score`'s.
        limit: only the first so many.
        split: of a hub dataset; the same as ``@split``.
        instruction: appended to the last message of each; None: a sentence on the answer's form where the dataset
            has bare questions, nothing where it has prompts; "": nothing.
        skip_unanswered: leave problems without an answer out, instead of refusing the dataset.
        report: called with a line that says how many were left out.

    Returns:
        The problems, in the order of the dataset. Their ids do not depend on ``limit``.

    Raises:
        UsageError: for a missing, empty or unknown dataset, a problem without an answer, or an unknown scorer.
    """
    if scorer != "auto":
        scorer_names.check_name(scorer)
    if limit is not None and limit < 1:
        raise UsageError(f"limit={limit}: must be at least 1.")
    name, rows = _rows(source, limit, split)
    try:
        layout, read = layout_of(rows[0], input_key, label_key)
    except UsageError as error:
        raise UsageError(f"--data {source}: {error}") from None
    problems = []
    for i, row in enumerate(rows):
        where = f"--data {source}: row {i + 1}"
        try:
            entry = read(row)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{where} ({layout} layout): {error}") from None
        problem = _problem(where, f"{name}-{i}", entry, scorer, instruction)
        if problem is not None:
            problems.append(problem)
        elif not skip_unanswered:
            raise UsageError(
                f"{where} has no answer ({layout} layout; columns {', '.join(row)}). Add the reference, or leave such"
                " rows out with --skip-unanswered."
            )
    if len(problems) < len(rows):
        report(f"{len(rows) - len(problems)} of {len(rows)} problems of {source} have no answer and are left out")
    if not problems:
        raise UsageError(f"--data {source}: no row has an answer ({layout} layout). Add the references.")
    return problems


def _rows(source: str, limit: int | None, split: str | None) -> tuple[str, list[Row]]:
    """A short name for ids, and the rows."""
    path = Path(source).expanduser()
    if path.suffix.lower() in ENDINGS or path.exists():
        return path.stem, read_rows("--data", source, limit)
    short = source.lower().replace("-", "_")
    hub = _HUB.fullmatch(BENCHMARKS.get(short, source))
    if hub is None:
        raise UsageError(
            f"{source!r} names no problems: it is neither a benchmark nor a file nor a hub name."
            f"{nearest(source, BENCHMARKS)} Give {', '.join(BENCHMARKS)}, a file ending in {', '.join(ENDINGS)}, or a"
            " hub name like owner/name, owner/name@split or owner/name:config@split."
        )
    name = short if short in BENCHMARKS else hub["name"].rpartition("/")[2]
    return name, _hub_rows(hub["name"], hub["config"], split or hub["split"], limit)


def _hub_rows(name: str, config: str | None, split: str | None, limit: int | None) -> list[Row]:
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"--data {name}: hub datasets are loaded by the package datasets. Run: pip install datasets"
        ) from None
    try:
        with _cache_alone_where_the_hub_is_out_of_reach(name):
            loaded = datasets.load_dataset(name, config, split=split)
    except Exception as error:
        message = " ".join(str(error).split())
        raise UsageError(
            f"--data {name}: cannot be loaded from the hub ({type(error).__name__}: {message[:300]})."
            " Without access to the hub give a local file instead: --data FILE.jsonl or FILE.parquet."
            " A gated dataset needs HF_TOKEN."
        ) from None
    if isinstance(loaded, dict):
        splits = [str(split) for split in loaded]
        chosen = splits[0] if len(splits) == 1 else next((s for s in _SPLITS if s in splits), None)
        if chosen is None:
            raise UsageError(f"--data {name}: has the splits {', '.join(splits)}. Name one: {name}@{splits[0]}.")
        loaded = loaded[chosen]
    rows = [dict(row) for row in islice(iter(loaded), limit)]
    if not rows:
        raise UsageError(f"--data {name} is empty. Name another split: {name}@SPLIT.")
    return rows


@contextmanager
def _cache_alone_where_the_hub_is_out_of_reach(name: str) -> Iterator[None]:
    """Asks the hub once; a loader that cannot reach it asks five times, for half a minute, and looks there then."""
    import datasets
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    try:
        if not any(before):
            HfApi().dataset_info(name, timeout=HUB_SECONDS)
    except (HfHubHTTPError, HFValidationError):
        pass  # an answer, which the loader will have too
    except Exception:  # of whatever library sends the request
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _problem(where: str, name: str, entry: Asked, scorer: str, instruction: str | None) -> Problem | None:
    """The problem of a row; None where it has no answer."""
    problem, form = entry
    problem = replace(problem, id=name, scorer=problem.scorer if scorer == "auto" else scorer)
    if not problem.answer and problem.scorer != "reasoning_gym":
        return None
    if problem.scorer == "choice":
        letters = string.ascii_uppercase[: len(problem.meta.get("options", string.ascii_uppercase))]
        letter = problem.answer.strip("().").upper()
        if len(letter) != 1 or letter not in letters:
            raise UsageError(
                f"{where}: the answer {problem.answer!r} is not a letter from A to {letters[-1]}, as scorer choice"
                " needs."
            )
        problem = replace(problem, answer=letter)
    if problem.scorer == "reasoning_gym" and "label" not in problem.meta:
        raise UsageError(f"{where} was not made by reasoning-gym: its metadata has no source_dataset.")
    add = form if instruction is None else instruction
    if add:
        *before, last = problem.messages
        problem = replace(problem, messages=(*before, {**last, "content": f"{last['content'].rstrip()}\n\n{add}"}))
    return problem
