"""The whole of a diagnosis: sample what is missing, then work everything out from the samples."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngrpo.diagnose import answers, embedding_map, engine, statistics, table
from ngrpo.diagnose.diagnosis_folder import DIAGNOSIS, MAP, REPORT, DiagnosisFolder
from ngrpo.diagnose.engine import Sampling
from ngrpo.diagnose.sample import Sample

if TYPE_CHECKING:
    from ngrpo.evaluate import Problem
    from ngrpo.strategies import Strategy

Report = Callable[[str], None]


def diagnose(
    model: str,
    problems: Sequence[Problem],
    strategies: Sequence[Strategy],
    *,
    out: str | Path,
    sampling: Sampling | None = None,
    dataset: str = "problems",
    with_map: bool = False,
    map_words: str | None = None,
    hardware: str = "auto",
    dtype: str = "auto",
    llm: Any = None,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Samples groups under each strategy and says how diverse and how valid they are.

    Strategies that are finished in the folder are kept; new ones may be added to it.

    Args:
        model: a packaged name, a folder or a hub name.
        problems: the prompts, with distinct ids.
        strategies: of :func:`ngrpo.strategies.parse_strategies`; the first unperturbed one is the baseline of the
            perplexity.
        out: the folder.
        sampling: group size, length, temperature, seed.
        dataset: what the problems are called in the result.
        with_map: make the embedding map too.
        map_words: the words of the map, with commas between them; None: ten usual ones.
        hardware: a hardware profile.
        dtype: of the model, as vLLM takes it.
        llm: a live engine of :func:`ngrpo.diagnose.engine.build` with room for these prompts, instead of a new one.
        report: called with lines of progress.

    Returns:
        The content of ``diagnosis.json``, which is also written, with its page ``diagnosis.html``.

    Raises:
        ValueError: for bad settings, a folder begun with others, or one that cannot be written.
    """
    sampling = sampling or Sampling()
    _check(problems, strategies)
    settings = {
        "model": model,
        "dataset": dataset,
        "problems": _digest(problems),
        "sampling": asdict(sampling),
        "dtype": dtype,
    }
    began = time.time()
    with DiagnosisFolder.opened(Path(out).expanduser(), report) as folder:
        folder.claim(settings)
        _check_kept(folder, strategies)
        missing = [strategy for strategy in strategies if strategy.id not in folder.finished]
        asked = {"words": map_words, "specs": [s.spec for s in strategies]}
        map_missing = with_map and (folder.read(MAP) or {}).get("asked") != asked
        tokenizer = _tokenizer(model, llm, report)
        if missing or map_missing:
            tokens = embedding_map.choose_tokens(tokenizer, map_words) if with_map else []
            llm = llm or _start(model, problems, sampling, tokenizer, hardware, dtype, bool(tokens), report)
            for strategy in missing:
                _add(folder, llm, strategy, problems, sampling, report)
            if map_missing:
                report("embedding map")
                made = embedding_map.make(llm, strategies, tokens, sampling.seed)
                folder.write(MAP, {"asked": asked, "map": made})
        result = _result(folder, settings, problems, strategies, sampling, tokenizer, with_map)
        result["seconds"] = round(time.time() - began, 1)
        folder.write(DIAGNOSIS, result)
        from ngrpo.report import write_diagnosis

        write_diagnosis(result, folder.path / REPORT)
    return result


def _check(problems: Sequence[Problem], strategies: Sequence[Strategy]) -> None:
    from ngrpo.evaluate import score

    if not problems:
        raise ValueError("no prompts to diagnose: the dataset is empty.")
    if not strategies:
        raise ValueError("no strategy to diagnose: name some with --perturbations.")
    # A missing package or a broken reward file must show before minutes of sampling, not after them.
    for problem in {problem.scorer: problem for problem in problems}.values():
        score(problem, problem.answer)


def _check_kept(folder: DiagnosisFolder, strategies: Sequence[Strategy]) -> None:
    for strategy in strategies:
        kept = folder.finished.get(strategy.id)
        if kept is not None and kept["perturbation"] != strategy.spec:
            raise ValueError(
                f"--out {folder.path}: {strategy.id!r} was sampled there with other options"
                f" ({kept['perturbation']}, now {strategy.spec}). Give a new folder."
            )


def _digest(problems: Sequence[Problem]) -> str:
    rows = json.dumps([asdict(problem) for problem in problems], sort_keys=True)
    return f"{len(problems)} prompts, sha256 {hashlib.sha256(rows.encode()).hexdigest()[:16]}"


def _tokenizer(model: str, llm: Any, report: Report) -> Any:
    if llm is not None:
        return llm.get_tokenizer()
    from transformers import AutoTokenizer

    from ngrpo import models

    path = models.resolve(model, report=report)
    try:
        return AutoTokenizer.from_pretrained(path)
    except OSError as error:  # a hub name without network, or a folder without a tokenizer
        raise ValueError(f"model {model!r}: its tokenizer cannot be loaded: {error}") from None


def _start(
    model: str,
    problems: Sequence[Problem],
    sampling: Sampling,
    tokenizer: Any,
    hardware: str,
    dtype: str,
    with_map: bool,
    report: Report,
) -> Any:
    from ngrpo import models

    longest = max(len(engine.prompt_tokens(tokenizer, problem)) for problem in problems) + sampling.max_tokens
    room = max(longest, embedding_map.ROOM if with_map else 0) + 1  # the perplexity's request draws one more token
    report("vLLM is starting")
    return engine.build(models.resolve(model, report=report), room, hardware=hardware, dtype=dtype)


def _add(
    folder: DiagnosisFolder,
    llm: Any,
    strategy: Strategy,
    problems: Sequence[Problem],
    sampling: Sampling,
    report: Report,
) -> None:
    began = time.time()
    report(f"{strategy.id}: {len(problems)} prompts × {sampling.group} answers")
    samples, facts = engine.sample_strategy(llm, strategy, problems, sampling)
    seconds = round(time.time() - began, 1)
    folder.keep(strategy.id, samples, {"perturbation": strategy.spec, "seconds": seconds, **facts})
    reward = sum(sample.reward for sample in samples) / len(samples)
    report(f"{strategy.id}: reward {reward:.3f}, {facts['tokens_per_second']:.0f} tokens/s, {seconds:.0f} s")


def _result(
    folder: DiagnosisFolder,
    settings: dict[str, Any],
    problems: Sequence[Problem],
    strategies: Sequence[Strategy],
    sampling: Sampling,
    tokenizer: Any,
    with_map: bool,
) -> dict[str, Any]:
    from ngrpo.summary import machine, versions

    groups: dict[str, list[list[Sample]]] = {s.id: statistics.groups_of(folder.samples(s.id)) for s in strategies}
    stats = {name: statistics.prompt_statistics(found) for name, found in groups.items()}
    plain = next((strategy.id for strategy in strategies if strategy.spec is None), None)
    rows = [
        statistics.strategy_row(
            strategy,
            groups[strategy.id],
            problems,
            stats[strategy.id],
            stats.get(plain) if plain is not None else None,
            folder.finished[strategy.id],
            sampling.seed,
        )
        for strategy in strategies
    ]
    drawn = {name: value for name, value in asdict(sampling).items() if name != "group"}
    return {
        "format": 1,
        "model": settings["model"],
        "dataset": settings["dataset"],
        "group": sampling.group,
        "prompts": len(problems),
        "sampling": {**drawn, "dtype": settings["dtype"]},
        "versions": versions(),
        "machine": machine(),
        "seconds": None,
        "baseline": plain,
        "strategies": rows,
        "warnings": table.warnings_of(rows, strategies),
        "samples": answers.side_by_side(problems, groups, tokenizer),
        "embedding_map": folder.read(MAP)["map"] if with_map else None,
    }
