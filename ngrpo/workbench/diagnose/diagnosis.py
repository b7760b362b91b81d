# SPDX-License-Identifier: Apache-2.0
"""The whole of a diagnosis: sample what is missing, then work everything out from the samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngrpo.machine.hardware import profile_for
from ngrpo.machine.models import packaged
from ngrpo.machine.upstream.versions import machine, versions
from ngrpo.workbench.diagnose import embedding_map, measuring, screen_table
from ngrpo.workbench.diagnose.diagnosis_folder import (
    DIAGNOSIS,
    MAP,
    REPORT,
    DiagnosisFolder,
    map_settings_of,
    settings_of,
)
from ngrpo.workbench.diagnose.sample import GroupSampling
from ngrpo.workbench.diagnose.side_by_side import side_by_side
from ngrpo.workbench.diagnose.strategy_row import groups_of, strategy_rows
from ngrpo.workbench.evaluate.engine import load_tokenizer
from ngrpo.workbench.evaluate.rollout_policy import RolloutPolicy
from ngrpo.workbench.evaluate.scorers import check_problems
from ngrpo.workbench.report import write_diagnosis
from perturbations.errors import UsageError

if TYPE_CHECKING:
    from vllm import LLM

    from ngrpo.config.arms import Arm
    from ngrpo.workbench.evaluate import Problem

Report = Callable[[str], None]


def diagnose(
    model: str,
    problems: Sequence[Problem],
    strategies: Sequence[Arm],
    *,
    out: str | Path,
    sampling: GroupSampling | None = None,
    dataset: str = "problems",
    policies: Sequence[RolloutPolicy] | None = None,
    with_map: bool = False,
    map_words: str | None = None,
    hardware: str = "auto",
    dtype: str | None = None,
    llm: LLM | None = None,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Samples groups under each strategy and says how diverse and how valid they are.

    Strategies that are finished in the folder are kept; new ones may be added to it.

    Args:
        model: a packaged name, a folder or a hub name.
        problems: the prompts, with distinct ids.
        strategies: of :func:`ngrpo.config.arms.parse_arms`; the first unperturbed one, with the model's own weights at
            one temperature, is the baseline of the perplexity.
        out: the folder.
        sampling: group size, length, temperature, seed.
        dataset: what the problems are called in the result.
        with_map: make the embedding map too.
        policies: what the rollouts of each strategy have beside its perturbation; None: nothing.
        map_words: the words of the map, with commas between them; None: ten usual ones.
        hardware: a hardware profile.
        dtype: of the model, as vLLM takes it; None: float32 on a CPU, the model's own with CUDA.
        llm: a live engine of `diagnose.measuring.build` with room for these prompts, instead of a new one.
        report: called with lines of progress.

    Returns:
        The content of ``diagnosis.json``, which is also written, with its page ``diagnosis.html``.

    Raises:
        UsageError: for bad settings, a folder begun with others, or one that cannot be written.
    """
    sampling = sampling or GroupSampling()
    check_problems(problems)
    if not strategies:
        raise UsageError("no strategy to diagnose: name some with --perturbations.")
    dtype = dtype or profile_for(hardware).engine_options.get("dtype", "auto")
    settings = settings_of(model, dataset, problems, sampling, dtype)
    path = packaged.resolve(model, report=report) if llm is None else model
    tokenizer = load_tokenizer(path) if llm is None else llm.get_tokenizer()
    began = time.time()
    with DiagnosisFolder.opened(Path(out).expanduser(), report) as folder:
        folder.claim(settings)
        policy = {s.id: p for s, p in zip(strategies, policies or [RolloutPolicy()] * len(strategies))}
        missing = [strategy for strategy in strategies if not folder.has(strategy, policy[strategy.id].described())]
        map_settings = map_settings_of(strategies, map_words)
        map_missing = with_map and (folder.read(MAP) or {}).get("asked") != map_settings
        if missing or map_missing:
            tokens = embedding_map.choose_tokens(tokenizer, map_words) if with_map else []
            if llm is None:
                longest = max(len(measuring.prompt_tokens(tokenizer, p)) for p in problems) + sampling.max_tokens
                # The perplexity's request draws one more token.
                room = max(longest, embedding_map.ROOM if with_map else 0) + 1
                report("vLLM is starting")
                llm = measuring.build(path, room, hardware=hardware, dtype=dtype)
            for strategy in missing:
                _add(folder, llm, path, strategy, policy[strategy.id], problems, sampling, report)
            if map_missing:
                report("embedding map")
                map_data = embedding_map.make(llm, strategies, tokens, sampling.seed)
                folder.write(MAP, {"asked": map_settings, "map": map_data})
        samples = folder.samples()
        groups = {s.id: groups_of(samples[s.id]) for s in strategies}
        rows = strategy_rows(strategies, groups, problems, folder.finished, sampling.seed)
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
            "baseline": next((s.id for s in strategies if s.spec is None and policy[s.id].plain), None),
            "strategies": rows,
            "warnings": screen_table.warnings_of(rows, strategies),
            "samples": side_by_side(problems, groups, tokenizer),
            "embedding_map": folder.read(MAP)["map"] if with_map else None,
        }
        folder.write(DIAGNOSIS, result)
        write_diagnosis(result, folder.path / REPORT)
    return result


def _add(
    folder: DiagnosisFolder,
    llm: LLM,
    model: str,
    strategy: Arm,
    policy: RolloutPolicy,
    problems: Sequence[Problem],
    sampling: GroupSampling,
    report: Report,
) -> None:
    began = time.time()
    report(f"{strategy.id}: {len(problems)} prompts × {sampling.group} answers")
    for note in policy.notes:
        report(f"warning: {strategy.id}: {note}")
    samples, facts = measuring.sample_strategy(llm, strategy, problems, sampling, model, policy)
    facts |= {"rollouts": policy.described()} if not policy.plain else {}
    seconds = round(time.time() - began, 1)
    folder.keep(strategy.id, samples, {"perturbation": strategy.spec, "seconds": seconds, **facts})
    reward = sum(sample.reward for sample in samples) / len(samples)
    report(f"{strategy.id}: reward {reward:.3f}, {facts['tokens_per_second']:.0f} tokens/s, {seconds:.0f} s")
