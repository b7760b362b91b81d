# SPDX-License-Identifier: Apache-2.0
"""A whole diagnosis: samples of the arms that lack them, then every result from the samples of all arms."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from ngrpo.config.arms import Arm
from ngrpo.machine.console import Report, fed_texts, text_table, token_texts
from ngrpo.machine.hardware import profile_for
from ngrpo.machine.models import conversation, packaged
from ngrpo.machine.storage.datafiles import contents
from ngrpo.machine.storage.result_folder import SETTINGS, ResultFolder
from ngrpo.machine.upstream.types import LLM, TokenizerLike
from ngrpo.machine.upstream.versions import conditions, differing_conditions, machine, recorded_versions
from ngrpo.methods.scoring import Problem, digest
from ngrpo.methods.tasks import check_problems
from ngrpo.workbench.diagnose import embedding_map, group_sampling
from ngrpo.workbench.diagnose.group_sampling import GroupSampling, Sample
from ngrpo.workbench.diagnose.measures import arm_rows, groups_of
from ngrpo.workbench.evaluate.engine import RolloutPolicy
from ngrpo.workbench.report import write_report
from ngrpo.workbench.report.diagnosis_charts import MEASURES
from ngrpo.workbench.report.headline import UNCORRECTED
from ngrpo.workbench.report.values import dig, format_number
from perturbations.errors import UsageError, require

SAMPLES = "samples.jsonl"
FINISHED = "finished.jsonl"
MAP = "embedding_map.json"
DIAGNOSIS = "diagnosis.json"
REPORT = "diagnosis.html"
QUESTIONS = 3
"""The number of questions whose responses are shown side by side."""
_MOSTLY = 0.5


def diagnose(
    model: str,
    problems: Sequence[Problem],
    arms: Sequence[Arm],
    *,
    out: str | Path,
    sampling: GroupSampling = GroupSampling(),
    dataset: str = "problems",
    policies: Sequence[RolloutPolicy] | None = None,
    with_map: bool = False,
    map_words: str | None = None,
    hardware: str = "auto",
    dtype: str | None = None,
    llm: LLM | None = None,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Samples groups under each arm, and writes their diversity and validity with a page for people.

    Arms that are finished in the folder are kept; new ones may be added to it.

    Args:
        model: a packaged name, a folder or a hub name.
        problems: the prompts, with distinct ids.
        arms: the first unperturbed one, without schedule and noise, is the baseline.
        out: the folder.
        policies: sampling schedule and parameter noise of each arm; None: neither.
        with_map: make the embedding map too, of ``map_words`` (with commas between; None: ten usual ones).
        dtype: of the model, as vLLM takes it; None: float32 on a CPU, the model's own with CUDA.
        llm: a live engine of `group_sampling.build` with room for these prompts, instead of a new one.

    Returns:
        The content of ``diagnosis.json``.

    Raises:
        UsageError: for bad settings, a folder begun with others, or one that cannot be written.
    """
    check_problems(problems)
    if not arms:
        raise UsageError("no arm to diagnose: name some with --perturbations.")
    dtype = dtype or profile_for(hardware).engine_options.get("dtype", "auto")
    if llm is None:
        path = packaged.resolve(model, report=report)
        tokenizer = packaged.load_tokenizer(path)
    else:
        path = model
        tokenizer = llm.get_tokenizer()
    began = time.time()
    with DiagnosisFolder.opened(Path(out).expanduser(), report) as folder:
        folder.claim(settings_of(model, dataset, problems, sampling, dtype))
        policies = policies or [RolloutPolicy()] * len(arms)
        policy_by_arm = {arm.id: policy for arm, policy in zip(arms, policies)}

        # 1. Sample the arms that the folder lacks, and draw its map.
        missing = [arm for arm in arms if not folder.has(arm, policy_by_arm[arm.id].described())]
        map_settings = map_settings_of(arms, map_words)
        map_missing = with_map and (folder.read(MAP) or {}).get("asked") != map_settings
        if missing or map_missing:
            tokens = embedding_map.choose_tokens(tokenizer, map_words) if with_map else []
            if llm is None:
                report("vLLM is starting")
                room = _longest_sequence(tokenizer, problems, sampling, with_map=with_map)
                llm = group_sampling.build(path, room, hardware=hardware, dtype=dtype)
            for arm in missing:
                _sample_into(folder, llm, arm, problems, sampling, path, policy_by_arm[arm.id], report)
            if map_missing:
                report("embedding map")
                template = {name: value for name, value in problems[0].template.items() if name != conversation.TOOLS}
                map_data = embedding_map.make(llm, arms, tokens, sampling.seed, template)
                folder.write(MAP, {"asked": map_settings, "map": map_data})

        # 2. Measure all arms from the samples in the folder.
        samples_by_arm = folder.samples()
        groups = {arm.id: groups_of(samples_by_arm[arm.id]) for arm in arms}
        unperturbed = [arm.id for arm in arms if arm.spec is None and not policy_by_arm[arm.id].specs]
        baseline = unperturbed[0] if unperturbed else None
        rows = arm_rows(arms, groups, problems, folder.finished, baseline, sampling.seed)

        # 3. Write the result and its page.
        runners = {facts["model_runner"] for facts in folder.finished.values() if "model_runner" in facts}
        sampling_settings = {name: value for name, value in asdict(sampling).items() if name != "group"}
        result = {
            "format": 1,
            "model": model,
            "dataset": dataset,
            "group": sampling.group,
            "prompts": len(problems),
            "sampling": {**sampling_settings, "dtype": dtype},
            "versions": recorded_versions(", ".join(sorted(runners))),
            "machine": machine(),
            "seconds": round(time.time() - began, 1),
            "baseline": baseline,
            "strategies": rows,
            "warnings": [*warnings_of(rows, arms), *folder.unlike_arms()],
            "samples": side_by_side(problems, groups, tokenizer),
            "embedding_map": folder.read(MAP)["map"] if with_map else None,
        }
        folder.write(DIAGNOSIS, result)
        write_report(result, folder.path / REPORT)
    return result


def _longest_sequence(
    tokenizer: TokenizerLike, problems: Sequence[Problem], sampling: GroupSampling, *, with_map: bool
) -> int:
    """The tokens of prompt and response for which the engine needs room."""
    longest_prompt = max(len(group_sampling.prompt_tokens(tokenizer, problem)) for problem in problems)
    longest = longest_prompt + sampling.max_tokens
    if with_map:
        longest = max(longest, embedding_map.ROOM)
    return longest + 1  # the request for the perplexity draws one token after the response


def _sample_into(
    folder: DiagnosisFolder,
    llm: LLM,
    arm: Arm,
    problems: Sequence[Problem],
    sampling: GroupSampling,
    model: str,
    policy: RolloutPolicy,
    report: Report,
) -> None:
    """Samples one arm and keeps it in the folder; ``report`` gets a line before and after."""
    began = time.time()
    report(f"{arm.id}: {len(problems)} prompts × {sampling.group} responses")
    for note in policy.notes:
        report(f"warning: {arm.id}: {note}")
    samples, facts = group_sampling.sample_arm(llm, arm, problems, sampling, model, policy)
    if policy.specs:
        facts["rollouts"] = policy.described()
    seconds = round(time.time() - began, 1)
    drawn_by = conditions(facts.get("model_runner"))
    folder.keep(arm.id, samples, {"perturbation": arm.spec, "seconds": seconds, **drawn_by, **facts})
    reward = sum(sample.reward for sample in samples) / len(samples)
    report(f"{arm.id}: reward {reward:.3f}, {facts['tokens_per_second']:.0f} tokens/s, {seconds:.0f} s")


# --- the folder -------------------------------------------------------------------------------------


def settings_of(
    model: str, dataset: str, problems: Sequence[Problem], sampling: GroupSampling, dtype: str
) -> dict[str, object]:
    """The settings that all arms of a folder share."""
    return {
        "model": model,
        "weights": packaged.fingerprint(model),
        "dataset": dataset,
        "problems": digest(problems),
        "scorer_files": contents(problem.scorer for problem in problems),
        "sampling": asdict(sampling),
        "dtype": dtype,
    }


def map_settings_of(arms: Sequence[Arm], words: str | None) -> dict[str, object]:
    """The settings of an embedding map."""
    return {"words": words, "specs": [arm.spec for arm in arms]}


State = Literal["finished", "unfinished", "other"]


class DiagnosisFolder(ResultFolder):
    """``finished.jsonl`` names an arm once all its samples are in ``samples.jsonl``; other samples are dropped.

    The files call an arm a ``strategy``, as the flag ``--strategy`` does.
    """

    finished: dict[str, dict[str, Any]]
    """The engine's facts about each finished arm, by id; with ``perturbation``, ``seconds`` and its conditions."""

    def claim(self, settings: Mapping[str, Any]) -> None:
        """As :meth:`ResultFolder.claim`; removes the samples of arms that are unfinished or lack some."""
        super().claim(settings)
        lines = self.lines(SAMPLES, "strategy", "tokens")
        samples_by_arm = Counter(line["strategy"] for line in lines)
        self.finished = {}
        for row in self.lines(FINISHED, "strategy", "samples", "perturbation"):
            arm = row.pop("strategy")
            if row["samples"] == samples_by_arm[arm]:
                self.finished[arm] = row
        remaining = [line for line in lines if line["strategy"] in self.finished]
        if len(remaining) < len(lines):
            self.write_lines(SAMPLES, remaining)

    def state(self, settings: object, drawn: Mapping[str, object], map_settings: object) -> State:
        """Whether the folder holds this diagnosis, a part of it or nothing (``unfinished``), or another one.

        Args:
            settings: of :func:`settings_of`.
            drawn: by arm, its spec and ``RolloutPolicy.described()``.
            map_settings: of :func:`map_settings_of`; None without a map.
        """
        if not self.path.is_dir() or all(entry.name.startswith(".") for entry in self.path.iterdir()):
            return "unfinished"
        rows = self.lines(FINISHED, "strategy", "samples", "perturbation")
        finished = {row["strategy"]: _drawn(row) for row in rows}
        if any(finished.get(arm, rollouts) != rollouts for arm, rollouts in drawn.items()):
            return "other"
        if self.read(SETTINGS) != _as_read(settings):
            return "other"

        document = self.read(DIAGNOSIS) or {"strategies": []}
        if {row["name"] for row in document["strategies"]} != set(drawn):
            return "unfinished"
        has_map = document.get("embedding_map") is not None
        settings_of_its_map = (self.read(MAP) or {}).get("asked") if has_map else None
        return "finished" if settings_of_its_map == _as_read(map_settings) else "unfinished"

    def has(self, arm: Arm, rollouts: Mapping[str, Any]) -> bool:
        """Whether an arm is finished here; UsageError where it was sampled with another spec or policy.

        ``rollouts``: its ``RolloutPolicy.described()``.
        """
        row = self.finished.get(arm.id)
        if row is None:
            return False
        now = (arm.spec, dict(rollouts))
        before = _drawn(row)
        if before == now:
            return True
        raise UsageError(
            f"--out {self.path}: {arm.id!r} was sampled there with other options ({_options(*before)}, now"
            f" {_options(*now)}). Give a new folder."
        )

    def unlike_arms(self) -> list[str]:
        """A warning where the arms were sampled with different software or on different processors."""
        differences = differing_conditions(row for row in self.finished.values() if "versions" in row)
        if not differences:
            return []
        return [
            f"the arms differ in {', '.join(differences)}, and not in the perturbation alone. To sample all alike, give"
            " --out a new folder."
        ]

    def samples(self) -> dict[str, list[Sample]]:
        """The samples by each finished arm's id."""
        samples: dict[str, list[Sample]] = {arm: [] for arm in self.finished}
        for number, line in enumerate(self.lines(SAMPLES, "strategy", "tokens"), start=1):
            try:
                samples[line["strategy"]].append(Sample.from_json(line))
            except (KeyError, TypeError, ValueError) as error:
                raise UsageError(f"{self.path / SAMPLES}: line {number} is no sample ({error}). Delete it.") from None
        return samples

    def keep(self, arm: str, samples: Sequence[Sample], facts: dict[str, Any]) -> None:
        """Adds a finished arm by its id."""
        self.append(SAMPLES, [sample.to_json() for sample in samples])
        self.finished[arm] = {"samples": len(samples), **facts}
        self.append(FINISHED, [{"strategy": arm, **self.finished[arm]}])


def _drawn(row: Mapping[str, object]) -> tuple[object, object]:
    """How a finished arm was sampled: its spec, and its ``RolloutPolicy.described()``."""
    return row["perturbation"], row.get("rollouts", {})


def _options(spec: object, rollouts: object) -> str:
    return f"{spec} and {rollouts}" if rollouts else str(spec)


def _as_read(settings: object) -> Any:
    """Settings as a file gives them back: JSON has no tuples."""
    return json.loads(json.dumps(settings))


# --- for people -------------------------------------------------------------------------------------


def side_by_side(
    problems: Sequence[Problem], groups: Mapping[str, Sequence[Sequence[Sample]]], tokenizer: TokenizerLike
) -> list[dict[str, Any]]:
    """``samples`` of diagnosis.json: the first questions, and the first response under each arm's id."""
    questions = []
    for number, problem in enumerate(problems[:QUESTIONS]):
        by_arm = []
        for arm, its_groups in groups.items():
            sample = its_groups[number][0]
            by_arm.append({"strategy": arm, "reward": sample.reward, "tokens": _token_rows(sample, tokenizer)})
        question = problem.messages[-1]["content"]
        questions.append({"problem": question, "answer": problem.answer, "by_strategy": by_arm})
    return questions


def _token_rows(sample: Sample, tokenizer: TokenizerLike) -> list[dict[str, Any]]:
    """Each token of a response: its text, whether its input was perturbed, and what was fed instead."""
    perturbed = sample.perturbed
    rows: list[dict[str, Any]] = []
    for index, text in enumerate(token_texts(sample.tokens, tokenizer)):
        rows.append({"text": text, "perturbed": index in perturbed})
    for index in perturbed:
        record = require(sample.record, "record")
        record_row = record.positions.tolist().index(index + record.prompt_tokens)
        rows[index] |= fed_texts(record, record_row, tokenizer)
    return rows


def table(diagnosis: dict[str, Any]) -> str:
    """The arms as aligned columns; a number that is missing is a dash."""
    arms = diagnosis["strategies"]
    header = [""]
    rows = [[row["name"]] for row in arms]
    for measure in MEASURES:
        if measure.screen_heading is None:
            continue
        header.append(measure.screen_heading.format(group=diagnosis["group"]))
        path = [key.format(group=diagnosis["group"]) for key in measure.path]
        for cells, row in zip(rows, arms):
            cells.append(format_number(dig(row, *path), measure.screen_digits))
    return "\n".join(text_table([header, *rows]))


def differences(diagnosis: dict[str, Any]) -> str:
    """A line for each arm with its paired differences to the unperturbed one, and what is to be expected by chance."""
    lines = []
    for row in diagnosis["strategies"]:
        texts = []
        for axis, difference in (row["difference"] or {}).items():
            noise = ", within noise" if difference["within_noise"] else ""
            texts.append(
                f"{axis} {difference['value']:+.3f} ({difference['low']:+.3f} to {difference['high']:+.3f}{noise})"
            )
        if texts:
            lines.append(f"{row['name']} against {diagnosis['baseline']}: {'; '.join(texts)}")
    return "\n".join([*lines, UNCORRECTED] if lines else [])


def warnings_of(rows: Sequence[dict[str, Any]], arms: Sequence[Arm]) -> list[str]:
    """Reasons to doubt an arm, from ``strategies`` of diagnosis.json."""
    warnings = []
    for row, arm in zip(rows, arms):
        if row["single_trajectory_groups"] == 1.0:
            why = f" ({arm.notes[0]})" if arm.notes else ""
            warnings.append(f"{arm.id}: every group is one trajectory, so there is nothing to learn from{why}")
            continue
        warnings += [f"{arm.id}: {text}" for text in (*arm.notes, *_doubts(row))]
    return warnings


def _doubts(row: Mapping[str, Any]) -> list[str]:
    doubts = []
    same_inputs = row["same_input_groups"]
    if same_inputs > _MOSTLY:
        doubts.append(
            f"in {same_inputs:.0%} of the groups all responses had the same inputs, so that the drawn text changes"
            " nothing that follows; lower the rate"
        )
    if row["learnable_groups"] == 0.0:
        if row["reward"] == 0.0:
            alike = "wrong"
        elif row["pass_at_k"]["1"] == 1.0:
            alike = "right"
        else:
            alike = "rewarded alike"
        doubts.append(f"in every group all responses are {alike}; GRPO's advantages are all zero")
    parsed = row["validity"]["parseable"]
    if parsed < _MOSTLY:
        doubts.append(f"{1 - parsed:.0%} of the responses have no final answer")
    looped = row["validity"]["repetition"]
    if looped > _MOSTLY:
        doubts.append(f"{looped:.0%} of the responses end in a loop")
    if row["truncated"] > _MOSTLY:
        doubts.append(f"{row['truncated']:.0%} of the responses reach the length limit; raise --max-tokens")
    return doubts
