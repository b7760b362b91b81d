# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a perturbed engine against stock vLLM, side by side in one process."""

from collections.abc import Iterator
from typing import Any

_LEAST_RATIO = 0.97


def measure(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each perturbation, rate and number of sequences."""
    from benchmarks import rollout
    from benchmarks.gpu import models
    from ngrpo.rollout import set_perturbation

    batches = arguments["batches"]
    engines = models.both_engines(arguments["model"], max(batches), arguments["rehearse"])
    for name, rate in arguments["perturbations"]:
        set_perturbation(engines.perturbed, name, rate=rate)
        for batch in batches:
            prompts = models.prompts(engines.stock, batch)
            speed = rollout.paired(engines.stock, engines.perturbed, prompts, arguments["tokens"], arguments["pairs"])
            yield {**engines.columns, "perturbation": name, "rate": rate, "sequences": batch, **speed}


def judge(rows: list[dict[str, Any]]) -> tuple[bool, str]:
    """The lowest ratio and the fastest batch; speed fails nothing."""
    lowest = min(rows, key=lambda row: row["ratio"])
    highest = max(row["ratio"] for row in rows)
    fastest = max(rows, key=lambda row: row["stock"])
    bound = "at least" if lowest["ratio"] >= _LEAST_RATIO else "BELOW"
    case = f"{lowest['perturbation']} {lowest['rate']:g}, {lowest['sequences']} sequences"
    return True, (
        f"{bound} {_LEAST_RATIO} of stock; ratio {lowest['ratio']:.3f} ({case}) to {highest:.3f},"
        f" stock {fastest['stock']:,.0f} tokens/s at {fastest['sequences']}"
    )
