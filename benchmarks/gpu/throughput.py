# SPDX-License-Identifier: Apache-2.0
"""Stage b: tokens per second of a perturbed engine against stock vLLM, side by side in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.stages import Case

TITLE = "rollout: tokens per second of a perturbed engine over stock vLLM"
_PERTURBATIONS = [["neighbor", 0.1], ["neighbor", 1.0], ["gumbel", 0.1], ["gumbel", 1.0]]


def cases(rehearse: bool) -> list[Case]:
    """SmolLM2, then random weights of the shape of a 1.5B model; V1 last, which vLLM will give up."""
    if rehearse:
        size = {"batches": [2], "tokens": 4, "pairs": 1, "perturbations": [["gumbel", 1.0]], "model": "tiny"}
        return [Case("V1 tiny", {**size, "rehearse": True, "runner": "V1"}, {"VLLM_USE_V2_MODEL_RUNNER": "0"})]
    size = {"batches": [64, 256, 1024], "tokens": 64, "pairs": 3, "perturbations": _PERTURBATIONS}
    return [
        Case(
            f"{runner} {model}",
            {**size, "rehearse": False, "model": model, "runner": runner},
            {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "V2"))},
        )
        for runner, model in (("V2", "smollm2-135m"), ("V2", "1.5b"), ("V1", "smollm2-135m"))
    ]


def measure(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each perturbation, rate and number of sequences."""
    import warnings

    from benchmarks import rollout
    from benchmarks.gpu import models
    from ngrpo.rollout import model_runner, set_perturbation

    warnings.simplefilter("ignore")
    rehearse, batches = arguments["rehearse"], arguments["batches"]
    if arguments["model"] == "smollm2-135m":
        folder, name = models.smollm2()
        weights = "auto"
    else:
        folder, name = models.without_weights(arguments["model"]), f"random weights, {arguments['model']}"
        weights = "dummy"
    options = {"max_num_seqs": max(batches), "load_format": weights, "disable_log_stats": True}
    if rehearse:
        options["kv_cache_memory_bytes"] = 1 << 26
    stock = rollout.engine(folder, None, not rehearse, **options)
    perturbed = rollout.engine(folder, {"name": "gumbel"}, not rehearse, **options)
    runner = model_runner(perturbed)
    if not rehearse and runner != arguments["runner"]:
        raise RuntimeError(f"the perturbed engine has the {runner} model runner, and stock {arguments['runner']}")
    for perturbation, rate in arguments["perturbations"]:
        set_perturbation(perturbed, perturbation, rate=rate)
        for batch in batches:
            rates = rollout.paired(
                stock, perturbed, models.prompts(stock, batch), arguments["tokens"], arguments["pairs"]
            )
            yield {
                "model": name,
                "runner": runner,
                "perturbation": perturbation,
                "rate": rate,
                "sequences": batch,
                **rates,
            }
