# SPDX-License-Identifier: Apache-2.0
"""Problems from benchmarks by name, files and hub datasets; the columns determine how a row is read."""

import json
import random
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngrpo.machine.console import Report
from ngrpo.machine.models import conversation
from ngrpo.machine.models.packaged import HUB_SECONDS
from ngrpo.machine.storage.datafiles import (
    ENDINGS,
    Row,
    is_nothing,
    is_saved_dataset,
    label_of,
    read_rows,
    with_shortest_floats,
)
from ngrpo.methods.scoring import Problem
from ngrpo.methods.scoring.answers import last_boxed
from ngrpo.methods.scoring.math_response import rewritten
from ngrpo.methods.scoring.reward_alarms import alarm_notes
from ngrpo.methods.scoring.reward_files import check_scorer_name
from perturbations.errors import UsageError, nearest

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

BENCHMARKS = {
    "deepscaler": "agentica-org/DeepScaleR-Preview-Dataset@train",  # problem, answer; 40,315 rows, for training
    "aime2024": "HuggingFaceH4/aime_2024@train",  # problem, answer; 30 rows
    "aime2025": "math-ai/aime25@test",  # problem, answer; 30 rows
    "amc23": "math-ai/amc23@test",  # question, answer; 40 rows
    "math500": "HuggingFaceH4/MATH-500@test",  # problem, answer; 500 rows
    "gpqa_diamond": "Idavidrein/gpqa:gpqa_diamond@train",  # GPQA's columns; 198 rows; gated
}
"""The papers' datasets by short name."""
BOXED = "Reason step by step and put the final answer in \\boxed{}."
LETTER = "Reason step by step and put the letter of the right option in \\boxed{}."
INPUT = "input"
"""The column of prompts in OpenRLHF's layout."""
LABEL = "label"
"""The column of references in OpenRLHF's layout."""

_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.-]+))?")
# The split to take where none is named; a test set before the rest.
_SPLITS = ("test", "validation", "train")
_QUESTIONS = ("problem", "question", "Problem", "Question", "query", "prompt")
_ANSWERS = ("answer", "Answer", "expected_answer", "final_answer", "target", "ground_truth", "label", "solution")
_OPTIONS = ("choices", "options", "Options")
_PICTURES_AND_SOUNDS = ("image", "images", "video", "videos", "audio", "audios")
_GPQA = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
# Options in the question itself: "(A) ...", "A. ...", "A) ..." at the start of a line.
_LISTED = re.compile(r"^\s*\(?([A-J])[).:]\s", re.MULTILINE)
_MARKUP = re.compile(r"\\(?:text|math|m?box)[a-z]*|[{}$]")  # \text{(E)}, and the {E} that some sets have left of it
# A reference that names options: B, (b), "A, C", "A and C", ACD, "(B) 12".
_LETTERS = re.compile(
    r"\(?[A-Ja-j]\)?(?:(?:\s*[,;&]\s*|\s*\band\b\s*|\s*)\(?[A-Ja-j]\)?)*|\(?[A-J][).:]\s.*", re.DOTALL
)
# More words than an answer has, such as "six hundred thousand"; LaTeX's are not counted.
_MOST_WORDS = 12
Messages = tuple[dict[str, Any], ...]


def load_problems(
    source: str,
    *,
    input_key: str | None = None,
    label_key: str | None = None,
    scorer: str = "auto",
    limit: int | None = None,
    split: str | None = None,
    instruction: str | None = None,
    skip_unanswered: bool = False,
    template: Mapping[str, Any] | None = None,
    report: Report = lambda line: None,
) -> list[Problem]:
    """Reads problems, in the order of the dataset; their ids do not depend on ``limit``.

    Args:
        source: a name of :data:`BENCHMARKS`, a JSONL, JSON, CSV or parquet file, a folder that `Dataset.save_to_disk`
            wrote, or a hub dataset ``owner/name[:config][@split]``.
        input_key: column of prompts. It must be in every row, and is read before any layout; None: by the layout.
        label_key: column of references, likewise; without an ``input_key`` it goes with :data:`INPUT`, else with the
            column of questions.
        scorer: ``auto`` (by layout), or one of :func:`ngrpo.workbench.evaluate.score`'s.
        limit: only the first N.
        split: of a hub dataset; the same as ``@split``.
        instruction: appended to the last message of each; None: a sentence on the answer's form after bare questions.
        skip_unanswered: leave problems without an answer out, instead of refusing the dataset.
        template: arguments of the chat template for all rows.
        report: called with a line that says how many were left out, and with warnings about a scorer's file.

    Raises:
        UsageError: for a missing, empty or unknown dataset, a row without a column that is named, a problem without an
            answer, or an unknown scorer.
    """
    if scorer != "auto":
        check_scorer_name(scorer)
    if scorer.endswith(".py"):
        for note in alarm_notes("--scorer", scorer):
            report(f"warning: {note}")
    if limit is not None and limit < 1:
        raise UsageError(f"--limit {limit}: must be at least 1 problem.")
    name, rows = _rows(source, limit, split)
    first_layout = ""
    answered = any(column in rows[0] for column in _ANSWERS)
    problems = []
    for index, row in enumerate(rows):
        where = f"--data {source}: row {index + 1}"
        layout, read = _layout(where, row, answered, input_key, label_key, scorer)
        first_layout = first_layout or layout
        if layout != first_layout:
            raise UsageError(
                f"{where} has the {layout} layout, row 1 the {first_layout} layout. Give each a file of its own."
            )
        _check_texts_alone(where, row)
        try:
            problem = replace(read(row), template={**(template or {}), **conversation.tools_of(row)})
            if conversation.INPUT_TEMPLATE in problem.template:  # needs no tokenizer
                conversation.rendered(None, problem.messages, problem.template)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{where} ({layout} layout): {error}") from None
        problem = replace(problem, id=f"{name}-{index}", scorer=problem.scorer if scorer == "auto" else scorer)
        if problem.answer or problem.scorer == "reasoning_gym":
            appended = _usual_instruction(layout, problem) if instruction is None else instruction
            problems.append(_with_instruction(with_readable_answer(where, problem), appended))
        elif not skip_unanswered:
            raise UsageError(
                f"{where} has no answer ({layout} layout; columns {', '.join(row)}). Add the reference, or leave such"
                " rows out with --skip-unanswered."
            )
    _report_options_without_letter(source, problems, report)
    _report_unmatchable(source, problems, report)
    if len(problems) < len(rows):
        report(f"{len(rows) - len(problems)} of {len(rows)} problems of {source} have no answer and are left out")
    if not problems:
        raise UsageError(f"--data {source}: no row has an answer ({first_layout} layout). Add the references.")
    return problems


def _usual_instruction(layout: str, problem: Problem) -> str:
    """A sentence on the answer's form after a bare question; a training set's prompts have their own."""
    if layout in ("verl", "OpenRLHF"):
        return ""
    return LETTER if problem.scorer == "choice" else BOXED


def with_readable_answer(where: str, problem: Problem) -> Problem:
    """The problem with a reference as its scorer reads it; UsageError, which begins with ``where``, if it cannot."""
    needs_entry = problem.scorer == "reasoning_gym" or problem.scorer.startswith("task:reasoning_gym")
    if needs_entry and "label" not in problem.meta:
        raise UsageError(f"{where} was not made by reasoning-gym: its label has no entry of a dataset.")
    keys = _mapping(problem.answer)
    if problem.scorer == "math" and keys:
        raise UsageError(
            f"{where}: the reference is an object with the keys {', '.join(keys)}, and math compares one answer. Name"
            " the column that has the answer alone with --label-key, or give --scorer FILE.py, which gets the object."
        )
    if problem.scorer != "choice":
        return problem
    letters = string.ascii_uppercase[: len(problem.meta.get("options", string.ascii_uppercase))]
    letter = problem.answer.strip("().").upper()
    if len(letter) != 1 or letter not in letters:
        raise UsageError(
            f"{where}: the answer {problem.answer!r} is not a letter from A to {letters[-1]}, as scorer choice needs."
        )
    return replace(problem, answer=letter)


def _report_options_without_letter(source: str, problems: Sequence[Problem], report: Report) -> None:
    """Warns of questions with options whose reference is no letter, such as an option's index: math compares it."""
    unlettered = []
    for problem in problems:
        answer = _MARKUP.sub("", problem.answer)
        if problem.scorer == "math" and _lists_options(problem.messages) and not _LETTERS.fullmatch(answer):
            unlettered.append(problem)
    if unlettered:
        first = unlettered[0]
        report(
            f"warning: {len(unlettered)} of {len(problems)} problems of {source} list options, and the reference is no"
            f" letter ({first.answer!r} in {first.id}). Scorer math compares the reference itself, so a response with"
            " the option's letter is wrong. Write the letter, or ask for what the reference has, with --instruction."
        )


def _report_unmatchable(source: str, problems: Sequence[Problem], report: Report) -> None:
    """Warns of references that hardly any response equals under scorer math."""
    faults = {}
    for problem in problems:
        fault = _fault_for_math(problem.answer) if problem.scorer == "math" else ""
        if fault:
            faults[problem.id] = f"{problem.answer!r:.60} in {problem.id}, which {fault}"
    if faults:
        report(
            f"warning: hardly any response equals {len(faults)} of {len(problems)} references of {source} under scorer"
            f" math, such as {next(iter(faults.values()))}. Correct or leave out such rows, or give --scorer FILE.py."
        )


def _fault_for_math(reference_text: str) -> str:
    """Why hardly any response equals a reference under scorer math, as the end of a sentence; empty for others."""
    text = last_boxed(reference_text) or reference_text
    braces = text.replace(r"\{", "").replace(r"\}", "")
    if not rewritten(text):
        return "is a bound and no value"
    if "\\" in text and braces.count("{") != braces.count("}"):
        return "has braces that do not close"
    if len(re.findall(r"[A-Za-z]{2,}", text)) > _MOST_WORDS and "\\" not in text:
        return f"has more than {_MOST_WORDS} words, which are compared one by one"
    return ""


def _with_instruction(problem: Problem, instruction: str) -> Problem:
    if not instruction:
        return problem
    *before, last = problem.messages
    text = f"{last['content'].rstrip()}\n\n{instruction}"
    return replace(problem, messages=(*before, {**last, "content": text}))


# --- sources ----------------------------------------------------------------------------------------


def _rows(source: str, limit: int | None, split: str | None) -> tuple[str, list[Row]]:
    """A short name for ids, and the rows."""
    path = Path(source).expanduser()
    if is_saved_dataset(path):
        import datasets

        return path.name, _dataset_rows(source, datasets.load_from_disk(path), limit, split)
    if path.is_dir():
        raise UsageError(
            f"--data {source}: is a folder of files. Give one of its files ({', '.join(ENDINGS)}), or a folder that"
            " `Dataset.save_to_disk` of the package `datasets` wrote."
        )
    if path.suffix.lower() in ENDINGS or path.exists():
        if split not in (None, "train"):
            raise UsageError(f"--split {split}: a file such as {source} has the split train alone. Leave it out.")
        return path.stem, read_rows("--data", source, limit)
    short = source.lower().replace("-", "_")
    hub = _HUB.fullmatch(BENCHMARKS.get(short, source))
    if hub is None:
        raise UsageError(
            f"{source!r} names no problems: it is neither a benchmark nor a file nor a hub name."
            f"{nearest(source, BENCHMARKS)} Give {', '.join(BENCHMARKS)}, a file ending in {', '.join(ENDINGS)}, or a"
            " hub name like owner/name, owner/name@split or owner/name:config@split."
        )
    name = hub["name"]
    if split and hub["split"] not in (None, split) and short not in BENCHMARKS:
        raise UsageError(f"--data {source}: names another split than --split {split}. Leave one of them out.")
    try:
        import datasets

        with offline_if_unreachable(name):
            loaded = datasets.load_dataset(name, hub["config"], split=split or hub["split"])
    except Exception as error:
        message = " ".join(str(error).split())
        raise UsageError(
            f"--data {name}: cannot be loaded from the hub ({type(error).__name__}: {message[:300]})."
            " Without access to the hub give a local file instead: --data FILE.jsonl or FILE.parquet."
            " A gated dataset needs HF_TOKEN."
        ) from None
    return short if short in BENCHMARKS else name.rpartition("/")[2], _dataset_rows(name, loaded, limit, split)


def _dataset_rows(name: str, loaded: "Dataset | DatasetDict", limit: int | None, split: str | None) -> list[Row]:
    """The rows of what the package `datasets` loaded: a split, or a dictionary of all splits."""
    if isinstance(loaded, dict):
        splits = [str(name_of_split) for name_of_split in loaded]
        if split is not None and split not in splits:
            raise UsageError(f"--data {name}: has no split {split!r}. Its splits: {', '.join(splits)}.")
        usual = [name_of_split for name_of_split in (split, *_SPLITS) if name_of_split in splits]
        if not usual and len(splits) > 1:
            raise UsageError(f"--data {name}: has the splits {', '.join(splits)}. Name one: --split {splits[0]}.")
        loaded = loaded[usual[0] if usual else splits[0]]
    columns = loaded.features.arrow_schema
    rows = []
    for row in islice(iter(loaded), limit):
        rows.append({column.name: with_shortest_floats(row[column.name], column.type) for column in columns})
    if not rows:
        raise UsageError(f"--data {name} is empty. Name another split with --split.")
    return rows


@contextmanager
def offline_if_unreachable(name: str) -> Iterator[None]:
    """Asks the hub once, and reads only the cache if there is no reply; a loader would ask five times."""
    import datasets
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    before = (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)
    try:
        if not any(before):
            HfApi().dataset_info(name, timeout=HUB_SECONDS)
    except (HfHubHTTPError, HFValidationError):
        pass  # a reply, which the loader gets too
    except Exception:  # of any library that sends the request
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


# --- layouts ----------------------------------------------------------------------------------------


def _layout(
    where: str, row: Row, answered: bool, input_key: str | None, label_key: str | None, scorer: str
) -> tuple[str, Callable[[Row], Problem]]:
    """The name of a row's layout, and its reader: a problem without id and instruction.

    ``answered``: whether a question may lack the column of its answer, as another row has it.
    """
    if input_key is not None:
        _check_column(where, row, "--input-key", input_key)
    if label_key is not None:
        _check_column(where, row, "--label-key", label_key)
    names_columns = input_key is not None or label_key is not None
    prompts = INPUT if input_key is None else input_key
    labels = LABEL if label_key is None else label_key
    takes_any_label = scorer.endswith(".py")
    if not names_columns and "prompt" in row and "reward_model" in row:
        return "verl", lambda row: _verl(row, takes_any_label=takes_any_label)
    if prompts in row:
        return "OpenRLHF", lambda row: _openrlhf(row, prompts, labels, takes_any_label=takes_any_label)
    if not names_columns and set(_GPQA) <= row.keys():
        return "GPQA", _gpqa
    answers = _ANSWERS if label_key is None else (label_key,)
    if any(name in row for name in _QUESTIONS) and (answered or any(name in row for name in answers)):
        return "question and answer", lambda row: _question(row, answers, takes_any_label=takes_any_label)
    raise UsageError(
        f"{where} has an unknown layout: the columns are {', '.join(row)}. Known: verl's prompt and reward_model;"
        f" {prompts!r} and {labels!r} (other columns with --input-key and --label-key); one of"
        f" {', '.join(_QUESTIONS)} with one of {', '.join(_ANSWERS)}; GPQA's Question, Correct Answer, Incorrect"
        " Answer 1 to 3."
    )


def _check_texts_alone(where: str, row: Row) -> None:
    """Raises ``UsageError`` for a row with pictures, videos or sounds, without which the question would be asked."""
    for column in _PICTURES_AND_SOUNDS:
        value = row.get(column)
        if not is_nothing(value) and value not in ("", []):
            raise UsageError(
                f"{where} has a value in the column {column!r}, and here a model reads texts alone. Give problems"
                " without pictures and sounds, or leave that column out if the questions do not need it."
            )


def _check_column(where: str, row: Row, flag: str, name: str) -> None:
    """Raises ``UsageError`` for a row without the column that a flag names."""
    if name not in row:
        raise UsageError(
            f"{where} has no column {name!r} ({flag}).{nearest(name, row)} Its columns: {', '.join(row)}. Name the"
            f" right one with {flag}."
        )


def _verl(row: Row, *, takes_any_label: bool) -> Problem:
    truth = _mapping(row["reward_model"]).get("ground_truth")
    label = label_of(truth)
    if isinstance(truth, dict) and not takes_any_label:
        # Some sets lost a target while their solution still has it in its box.
        target = truth.get("target")
        has_target = not is_nothing(target) and target != ""
        label = target if has_target else last_boxed(str(truth.get("solution") or ""))
    meta = {key: row[key] for key in ("data_source", "level", "type") if isinstance(row.get(key), str)}
    problem = _labelled(row["prompt"], label, takes_any_label=takes_any_label)
    return replace(problem, meta={**meta, **problem.meta})


def _labelled(prompt: object, label: object, *, takes_any_label: bool) -> Problem:
    """A problem with its label; ``meta["raw_label"]`` has the label where the answer has another form.

    ``takes_any_label``: a reward file is given the label as it is, so that a list may have several answers.
    """
    if takes_any_label and isinstance(label, str):
        answer = label.strip()
    elif takes_any_label and isinstance(label, (list, tuple)) and len(label) > 1:
        answer = json.dumps(label, ensure_ascii=False)
    else:
        answer = reference(label)
    problem = _guessed(_messages(prompt), answer)
    return problem if label == answer else replace(problem, meta={"raw_label": label})


def _openrlhf(row: Row, input_key: str, label_key: str, *, takes_any_label: bool) -> Problem:
    if label_key not in row:
        raise UsageError(f"a column {input_key!r}, but no {label_key!r}; name the reference's with --label-key.")
    label = label_of(row[label_key])
    entry = _mapping(label)
    if "entry" in entry and "dataset" in entry:  # written by the task reasoning_gym
        return Problem(
            id="",
            messages=_messages(row[input_key]),
            answer=str(entry["entry"].get("answer") or ""),
            scorer="reasoning_gym",
            meta={"label": reference(label)},
        )
    return _labelled(row[input_key], label, takes_any_label=takes_any_label)


def _gpqa(row: Row) -> Problem:
    question = str(row["Question"])
    right = str(row["Correct Answer"] or "").strip()
    wrong = [str(row[column]).strip() for column in _GPQA[2:]]
    options = [right, *wrong]
    # The right option comes first in the file: shuffled by the question alone, so alike in every run.
    random.Random(question).shuffle(options)
    lines = [f"{letter}) {option}" for letter, option in zip(string.ascii_uppercase, options)]
    messages = _messages("\n".join([question.strip(), "", *lines]))
    answer = string.ascii_uppercase[options.index(right)] if right else ""
    return Problem(id="", messages=messages, answer=answer, scorer="choice", meta={"options": options})


def _question(row: Row, answers: Sequence[str], *, takes_any_label: bool) -> Problem:
    """``answers``: the columns that may hold the answer; the first that is there does."""
    for column in _OPTIONS:
        if row.get(column):
            raise UsageError(
                f"the column {column!r} is not read ({row[column]!r:.80}). Write its options into the question, A)"
                " first, with the right letter as the answer, and leave the column out."
            )
    question = next((name for name in _QUESTIONS if name in row), "question")
    column = next((name for name in answers if name in row), "answer")
    label = label_of(row.get(column))
    if column == "solution" and not takes_any_label:  # MATH: the solution, its result boxed
        label = last_boxed(reference(label)) or label
    return _labelled(row[question], label, takes_any_label=takes_any_label)


def _guessed(messages: Messages, answer: str) -> Problem:
    """Scored by ``choice`` where the answer is a letter and the question lists options A and B, else by ``math``."""
    is_letter = re.fullmatch(r"\(?[A-Ja-j]\)?", answer) is not None
    scorer = "choice" if is_letter and _lists_options(messages) else "math"
    return Problem(id="", messages=messages, answer=answer, scorer=scorer)


def _lists_options(messages: Messages) -> bool:
    """Whether the last message has options A and B, each at the beginning of a line."""
    return {"A", "B"} <= set(_LISTED.findall(messages[-1]["content"]))


def _messages(value: Any) -> Messages:
    """A text as a user's message, or a list of messages with every field that a chat template may show."""
    fault = conversation.fault(value)
    if fault:
        raise UsageError(f"no question: the prompt is {fault}. {fault.fix}")
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    return tuple(conversation.normalised(messages))


def reference(value: object) -> str:
    """A label as the text that our scorers compare with; a list, or JSON of a list of texts, must hold one.

    Of a solution as GSM8K has it, the result after ``####`` is taken.
    """
    if isinstance(value, str) and value.lstrip().startswith('["'):
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, (list, tuple)):
        if len(value) > 1:
            raise UsageError(f"{len(value)} reference answers ({value!r:.80}); one is supported.")
        value = value[0] if value else ""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    text = str(label_of(value)).strip()
    return text if _mapping(text) else text.rpartition("####")[2].strip()


def _mapping(value: object) -> dict[str, Any]:
    """A dictionary, or JSON text of one; {} for anything else."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    return value if isinstance(value, dict) else {}
