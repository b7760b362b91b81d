# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a perturbed engine against stock vLLM, side by side in one process."""

from collections.abc import Iterator
from typing import Any


def measure(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each perturbation, rate and number of sequences."""
    from benchmarks import rollout
    from benchmarks.gpu import models
    from ngrpo.rollout import set_perturbation

    batches = arguments["batches"]
    stock, perturbed, kind = models.both_engines(arguments["model"], max(batches), arguments["rehearse"])
    for name, rate in arguments["perturbations"]:
        set_perturbation(perturbed, name, rate=rate)
        for batch in batches:
            prompts = models.prompts(stock, batch)
            rates = rollout.paired(stock, perturbed, prompts, arguments["tokens"], arguments["pairs"])
            yield {**kind, "perturbation": name, "rate": rate, "sequences": batch, **rates}


def judge(rows: list[dict[str, Any]]) -> tuple[bool, str]:
    """The lowest ratio and the fastest batch; speed fails nothing."""
    worst, best = min(rows, key=lambda row: row["ratio"]), max(rows, key=lambda row: row["stock"])
    where = f"{worst['perturbation']} {worst['rate']:g}, {worst['sequences']} sequences"
    bound = "at least" if worst["ratio"] >= 0.97 else "BELOW"
    highest = max(row["ratio"] for row in rows)
    return True, (
        f"{bound} 0.97 of stock; ratio {worst['ratio']:.3f} ({where}) to {highest:.3f},"
        f" stock {best['stock']:,.0f} tokens/s at {best['sequences']}"
    )
