# SPDX-License-Identifier: Apache-2.0
"""A published comparison, cut down, and with what it lacks: a failed run, an embedding map, kept groups."""

import gzip
import json
from collections.abc import Sequence
from typing import Any

from ngrpo.workbench.compare import summaries
from tests.conftest import ROOT

STRATEGIES = ("none", "neighbor", "gaussian sigma_of=vector", "gumbel")
PUBLISHED = gzip.decompress((ROOT / "docs" / "results" / "sums" / "results.json.gz").read_bytes())
ERROR = "MemoryError: 'gumbel' <ran> out of memory"


def example(steps: int = 8, seeds: int = 3, strategies: Sequence[str] = STRATEGIES) -> dict[str, Any]:
    """The content of a results.json; more than eight steps repeat these, and the third run of gumbel has failed."""
    content = json.loads(PUBLISHED)
    del content["checksum"]
    runs = [run for run in content["runs"] if run["strategy"] in strategies and run["seed"] < seeds]
    for run in runs:
        run["steps"] = [{**run["steps"][index % 8], "step": index + 1} for index in range(steps)]
        if run["id"] == "gumbel-seed2":
            run |= {"status": "failed", "error": ERROR, "evaluation": None}
    return {
        **content,
        "strategies": [row for row in content["strategies"] if row["id"] in strategies],
        "runs": runs,
        "summary": summaries.summarise(runs, strategies, "none"),
        "diagnosis": diagnosis(strategies),
    }


def diagnosis(strategies: Sequence[str] = STRATEGIES) -> dict[str, Any]:
    """The content of a diagnosis.json."""
    content = json.loads(PUBLISHED)["diagnosis"]
    content["strategies"] = [row for row in content["strategies"] if row["name"] in strategies]
    for sample in content["samples"]:
        sample["by_strategy"] = [answer for answer in sample["by_strategy"] if answer["strategy"] in strategies]
    perturbed = [name for name in strategies if name != "none"]
    return {**content, "embedding_map": _embedding_map(perturbed)}


def _embedding_map(strategies: Sequence[str]) -> dict[str, Any]:
    """Two tokens with a neighbor each, and three copies: read as the token, as its neighbor and as another word."""
    tokens = [
        {"id": 300, "text": " seven", "x": -1.0, "y": 0.5},
        {"id": 301, "text": "\n", "x": 1.5, "y": -0.5},
    ]
    neighbors = []
    points = []
    for index, token in enumerate(tokens):
        neighbor_text = f"{token['text']}s"
        neighbors.append({**token, "token": index, "text": neighbor_text, "x": token["x"] + 0.3})
        for distance, nearest in ((0.1, token["text"]), (0.3, neighbor_text), (0.9, " lorem")):
            point = {
                "token": index,
                "x": token["x"] + distance,
                "y": token["y"] - distance,
                "nearest": nearest,
                "related": distance < 0.5,
            }
            points.append(point)
    perturbations = []
    for name in strategies:
        perturbations.append({"strategy": name, "points": points, "unrelated_share": 1 / 3, "changed_share": 2 / 3})
    return {"metric": "cosine", "tokens": tokens, "neighbors": neighbors, "perturbations": perturbations}


def groups(steps: int = 3, answers: int = 8) -> list[dict[str, Any]]:
    """Kept steps as `ngrpo.trainers.openrlhf.kept_groups` writes them: two prompts each, two tokens perturbed."""
    rewards = [float(index % 3 == 0) for index in range(4 * answers)]
    mixture = {"candidates": [[" word4", 0.75], [" thus", 0.2], ["\n", 0.05]]}
    kept = []
    for number in range(2):
        group = []
        for index in range(answers):
            tokens = [f" word{place}" for place in range(30 - 2 * (index % 4))]
            answer = {
                "reward": rewards[number * answers + index],
                "advantage": 0.5,
                "tokens": tokens,
                "gaps": [0.001] * len(tokens),
                "fed": [[4, mixture], [9, mixture]],
            }
            group.append(answer)
        group[-1]["cut"] = 41
        diversity = {"different": 4.0, "distinct_2": 0.31, "common_prefix": 12.5}
        kept.append({"prompt": f"What is {number} + 7?", "diversity": diversity, "answers": group})
    return [{"step": 10 * step + 1, "rewards": rewards, "size": answers, "groups": kept} for step in range(steps)]
