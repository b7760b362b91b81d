# SPDX-License-Identifier: Apache-2.0
"""A whole diagnosis: samples of the missing strategies, then every result from the samples of all."""

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
from ngrpo.machine.upstream.versions import machine, versions
from ngrpo.methods.scoring import Problem, digest
from ngrpo.methods.tasks import check_problems
from ngrpo.workbench.diagnose import embedding_map, group_sampling
from ngrpo.workbench.diagnose.group_sampling import GroupSampling, Sample
from ngrpo.workbench.diagnose.measures import groups_of, strategy_rows
from ngrpo.workbench.evaluate.engine import RolloutPolicy
from ngrpo.workbench.report import write_report
from ngrpo.workbench.report.charts import MEASURES
from ngrpo.workbench.report.values import dig, format_number
from perturbations.errors import UsageError, require

SAMPLES, FINISHED, MAP = "samples.jsonl", "finished.jsonl", "embedding_map.json"
DIAGNOSIS, REPORT = "diagnosis.json", "diagnosis.html"
# Questions with responses side by side.
QUESTIONS = 3
_MOSTLY = 0.5


def diagnose(
    model: str,
    problems: Sequence[Problem],
    strategies: Sequence[Arm],
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
    """Samples groups under each strategy, and writes their diversity and validity with a page for people.

    Strategies that are finished in the folder are kept; new ones may be added to it.

    Args:
        model: a packaged name, a folder or a hub name.
        problems: the prompts, with distinct ids.
        strategies: the first unperturbed one, without schedule and noise, is the baseline.
        out: the folder.
        policies: sampling schedule and parameter noise of each strategy; None: neither.
        with_map: make the embedding map too, of ``map_words`` (with commas between; None: ten usual ones).
        dtype: of the model, as vLLM takes it; None: float32 on a CPU, the model's own with CUDA.
        llm: a live engine of `group_sampling.build` with room for these prompts, instead of a new one.

    Returns:
        The content of ``diagnosis.json``.

    Raises:
        UsageError: for bad settings, a folder begun with others, or one that cannot be written.
    """
    check_problems(problems)
    if not strategies:
        raise UsageError("no strategy to diagnose: name some with --perturbations.")
    dtype = dtype or profile_for(hardware).engine_options.get("dtype", "auto")
    path = packaged.resolve(model, report=report) if llm is None else model
    tokenizer = packaged.load_tokenizer(path) if llm is None else llm.get_tokenizer()
    began = time.time()
    with DiagnosisFolder.opened(Path(out).expanduser(), report) as folder:
        folder.claim(settings_of(model, dataset, problems, sampling, dtype))
        policy = {s.id: p for s, p in zip(strategies, policies or [RolloutPolicy()] * len(strategies))}
        missing = [strategy for strategy in strategies if not folder.has(strategy, policy[strategy.id].described())]
        map_settings = map_settings_of(strategies, map_words)
        map_missing = with_map and (folder.read(MAP) or {}).get("asked") != map_settings
        if missing or map_missing:
            tokens = embedding_map.choose_tokens(tokenizer, map_words) if with_map else []
            if llm is None:
                longest = max(len(group_sampling.prompt_tokens(tokenizer, p)) for p in problems) + sampling.max_tokens
                # The perplexity's request draws one more token.
                room = max(longest, embedding_map.ROOM if with_map else 0) + 1
                report("vLLM is starting")
                llm = group_sampling.build(path, room, hardware=hardware, dtype=dtype)
            for strategy in missing:
                its_policy, began_one = policy[strategy.id], time.time()
                report(f"{strategy.id}: {len(problems)} prompts × {sampling.group} responses")
                for note in its_policy.notes:
                    report(f"warning: {strategy.id}: {note}")
                samples, facts = group_sampling.sample_strategy(llm, strategy, problems, sampling, path, its_policy)
                facts |= {"rollouts": its_policy.described()} if its_policy.specs else {}
                seconds = round(time.time() - began_one, 1)
                folder.keep(strategy.id, samples, {"perturbation": strategy.spec, "seconds": seconds, **facts})
                reward, speed = sum(sample.reward for sample in samples) / len(samples), facts["tokens_per_second"]
                report(f"{strategy.id}: reward {reward:.3f}, {speed:.0f} tokens/s, {seconds:.0f} s")
            if map_missing:
                report("embedding map")
                template = {name: each for name, each in problems[0].template.items() if name != conversation.TOOLS}
                map_data = embedding_map.make(llm, strategies, tokens, sampling.seed, template)
                folder.write(MAP, {"asked": map_settings, "map": map_data})
        kept = folder.samples()
        groups = {s.id: groups_of(kept[s.id]) for s in strategies}
        baseline = next((s.id for s in strategies if s.spec is None and not policy[s.id].specs), None)
        rows = strategy_rows(strategies, groups, problems, folder.finished, baseline, sampling.seed)
        runners = sorted({facts["model_runner"] for facts in folder.finished.values() if "model_runner" in facts})
        sampling_settings = {name: value for name, value in asdict(sampling).items() if name != "group"}
        result = {
            "format": 1,
            "model": model,
            "dataset": dataset,
            "group": sampling.group,
            "prompts": len(problems),
            "sampling": {**sampling_settings, "dtype": dtype},
            "versions": versions(", ".join(runners)),
            "machine": machine(),
            "seconds": round(time.time() - began, 1),
            "baseline": baseline,
            "strategies": rows,
            "warnings": warnings_of(rows, strategies),
            "samples": side_by_side(problems, groups, tokenizer),
            "embedding_map": folder.read(MAP)["map"] if with_map else None,
        }
        folder.write(DIAGNOSIS, result)
        write_report(result, folder.path / REPORT)
    return result


# --- the folder -------------------------------------------------------------------------------------


def settings_of(
    model: str, dataset: str, problems: Sequence[Problem], sampling: GroupSampling, dtype: str
) -> dict[str, object]:
    """The settings that all strategies of a folder share."""
    drawn_from: dict[str, object] = {"model": model, "weights": packaged.fingerprint(model), "dataset": dataset}
    drawn_from |= {"problems": digest(problems), "scorer_files": contents(p.scorer for p in problems)}
    return {**drawn_from, "sampling": asdict(sampling), "dtype": dtype}


def map_settings_of(strategies: Sequence[Arm], words: str | None) -> dict[str, object]:
    """The settings of an embedding map."""
    return {"words": words, "specs": [strategy.spec for strategy in strategies]}


State = Literal["finished", "unfinished", "other"]


class DiagnosisFolder(ResultFolder):
    """``finished.jsonl`` names a strategy once all its samples are in ``samples.jsonl``; other samples are dropped."""

    finished: dict[str, dict[str, Any]]
    """The engine's facts about each finished strategy, by id; with its ``perturbation`` and ``seconds``."""

    def claim(self, settings: Mapping[str, Any]) -> None:
        """As :meth:`ResultFolder.claim`; removes the samples of strategies that are not finished, or not all here."""
        super().claim(settings)
        lines = self.lines(SAMPLES, "strategy", "tokens")
        counts = Counter(line["strategy"] for line in lines)
        rows = self.lines(FINISHED, "strategy", "samples", "perturbation")
        self.finished = {row.pop("strategy"): row for row in rows if row["samples"] == counts[row["strategy"]]}
        remaining = [line for line in lines if line["strategy"] in self.finished]
        if len(remaining) < len(lines):
            self.write_lines(SAMPLES, remaining)

    def state(self, settings: object, drawn: Mapping[str, object], map_settings: object) -> State:
        """Whether the folder holds a whole diagnosis, a part of it or nothing, or another one.

        ``drawn`` has each strategy's spec and ``RolloutPolicy.described()``; without a map its settings are None.
        """
        if not self.path.is_dir() or all(entry.name.startswith(".") for entry in self.path.iterdir()):
            return "unfinished"
        kept = {row["strategy"]: _drawn(row) for row in self.lines(FINISHED, "strategy", "samples", "perturbation")}
        differ = any(kept.get(name, now) != now for name, now in drawn.items())
        if differ or self.read(SETTINGS) != json.loads(json.dumps(settings)):
            return "other"
        document = self.read(DIAGNOSIS) or {"strategies": []}
        made = None if document.get("embedding_map") is None else (self.read(MAP) or {}).get("asked")
        found = ({row["name"] for row in document["strategies"]}, made)
        return "finished" if found == (set(drawn), json.loads(json.dumps(map_settings))) else "unfinished"

    def has(self, strategy: Arm, rollouts: Mapping[str, Any]) -> bool:
        """Whether a strategy, drawn by ``RolloutPolicy.described()``, is finished here; UsageError where otherwise."""
        row = self.finished.get(strategy.id)
        now = (strategy.spec, dict(rollouts))
        if row is None or _drawn(row) == now:
            return row is not None
        options = (f"{spec} and {policy}" if policy else str(spec) for spec, policy in (_drawn(row), now))
        raise UsageError(
            f"--out {self.path}: {strategy.id!r} was sampled there with other options ({', now '.join(options)}). Give"
            " a new folder."
        )

    def samples(self) -> dict[str, list[Sample]]:
        """The samples by each finished strategy's id."""
        samples: dict[str, list[Sample]] = {strategy: [] for strategy in self.finished}
        for number, line in enumerate(self.lines(SAMPLES, "strategy", "tokens"), start=1):
            try:
                samples[line["strategy"]].append(Sample.from_json(line))
            except (KeyError, TypeError, ValueError) as error:
                raise UsageError(f"{self.path / SAMPLES}: line {number} is no sample ({error}). Delete it.") from None
        return samples

    def keep(self, strategy: str, samples: Sequence[Sample], facts: dict[str, Any]) -> None:
        """Adds a finished strategy."""
        self.append(SAMPLES, [sample.to_json() for sample in samples])
        self.finished[strategy] = {"samples": len(samples), **facts}
        self.append(FINISHED, [{"strategy": strategy, **self.finished[strategy]}])


def _drawn(row: Mapping[str, object]) -> tuple[object, object]:
    """How a finished strategy was sampled: its spec, and its ``RolloutPolicy.described()``."""
    return row["perturbation"], row.get("rollouts", {})


# --- for people -------------------------------------------------------------------------------------


def side_by_side(
    problems: Sequence[Problem], groups: Mapping[str, Sequence[Sequence[Sample]]], tokenizer: TokenizerLike
) -> list[dict[str, Any]]:
    """``samples`` of diagnosis.json: the first questions, and the first response under each strategy's id."""
    questions = []
    for number, problem in enumerate(problems[:QUESTIONS]):
        by_strategy = []
        for name, its_groups in groups.items():
            sample = its_groups[number][0]
            texts, perturbed = token_texts(sample.tokens, tokenizer), sample.perturbed
            tokens: list[dict[str, Any]] = [{"text": text, "perturbed": i in perturbed} for i, text in enumerate(texts)]
            for i in perturbed:
                record = require(sample.record, "record")
                row = record.positions.tolist().index(i + record.prompt_tokens)
                tokens[i] |= fed_texts(record, row, tokenizer)
            by_strategy.append({"strategy": name, "reward": sample.reward, "tokens": tokens})
        question = {"problem": problem.messages[-1]["content"], "answer": problem.answer}
        questions.append({**question, "by_strategy": by_strategy})
    return questions


def table(diagnosis: dict[str, Any]) -> str:
    """The strategies as aligned columns; an unknown number is a dash."""
    rows = [[""], *([row["name"]] for row in diagnosis["strategies"])]
    for _, _, heading, decimals, keys in MEASURES:
        if heading:
            heading, *keys = (text.format(group=diagnosis["group"]) for text in (heading, *keys))
            numbers = (format_number(dig(row, *keys), decimals) for row in diagnosis["strategies"])
            for row, cell in zip(rows, (heading, *numbers)):
                row.append(cell)
    return "\n".join(text_table(rows))


def differences(diagnosis: dict[str, Any]) -> str:
    """One line per strategy: its paired differences to the unperturbed one, and whether they are within noise."""
    lines = []
    for strategy in diagnosis["strategies"]:
        parts = [
            f"{name} {found['value']:+.3f} ({found['low']:+.3f} to {found['high']:+.3f}"
            + (", within noise)" if found["within_noise"] else ")")
            for name, found in (strategy["difference"] or {}).items()
        ]
        if parts:
            lines.append(f"{strategy['name']} against {diagnosis['baseline']}: {'; '.join(parts)}")
    return "\n".join(lines)


def warnings_of(rows: Sequence[dict[str, Any]], strategies: Sequence[Arm]) -> list[str]:
    """Reasons to doubt a strategy, from ``strategies`` of diagnosis.json."""
    warnings = []
    for row, strategy in zip(rows, strategies):
        if row["single_trajectory_groups"] == 1.0:
            why = f" ({strategy.notes[0]})" if strategy.notes else ""
            warnings.append(f"{strategy.id}: every group is one trajectory, so there is nothing to learn from{why}")
            continue
        warnings += [f"{strategy.id}: {note}" for note in strategy.notes]
        same, cut = row["same_input_groups"], row["truncated"]
        parsed, looped = row["validity"]["parseable"], row["validity"]["repetition"]
        alike = "wrong" if row["reward"] == 0.0 else "right" if row["pass_at_k"]["1"] == 1.0 else "rewarded alike"
        found = {
            f"in {same:.0%} of the groups all responses had the same inputs, so that the drawn text changes nothing"
            " that follows; lower the rate": same > _MOSTLY,
            f"in every group all responses are {alike}; GRPO's advantages are all zero": row["learnable_groups"] == 0.0,
            f"{1 - parsed:.0%} of the responses have no final answer": parsed < _MOSTLY,
            f"{looped:.0%} of the responses end in a loop": looped > _MOSTLY,
            f"{cut:.0%} of the responses reach the length limit; raise --max-tokens": cut > _MOSTLY,
        }
        warnings += [f"{strategy.id}: {text}" for text, holds in found.items() if holds]
    return warnings
