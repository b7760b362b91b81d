# SPDX-License-Identifier: Apache-2.0
"""A made-up comparison and its diagnosis, of the shape that real ones have. All numbers come from one seed."""

import math
import random
import shlex
from typing import Any

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
STRATEGIES = ("none", "neighbor rate=0.1", "gaussian rate=0.1", "gumbel")
SPECS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "neighbor rate=0.1": {"name": "neighbor", "rate": 0.1, "k": 3, "metric": "cosine", "variant": "paper"},
    "gaussian rate=0.1": {"name": "gaussian", "rate": 0.1, "std": 0.03, "base": "token"},
    "gumbel": {"name": "gumbel", "rate": 1.0, "k": 5, "temperature": 0.1},
}
# How fast a strategy learns, where it ends, how diverse and how valid its answers are.
CHARACTER = {
    "none": (11.0, 0.84, 0.31, 0.93),
    "neighbor rate=0.1": (9.0, 0.90, 0.39, 0.91),
    "gaussian rate=0.1": (12.0, 0.83, 0.35, 0.86),
    "gumbel": (16.0, 0.74, 0.52, 0.71),
}
MACHINE = {"system": "Linux-6.1-x86_64-with-glibc2.36", "cores": 2, "python": "3.11.2"}
VERSIONS = {"ngrpo": "0.1.0", "vllm": "0.29.0", "openrlhf": "0.11.2"}
KS = (1, 2, 4, 8)
DIVERSITY = ("distinct_answers", "distinct_intermediate", "self_bleu", "distinct_2", "edit_distance", "score")
VALIDITY = ("parseable", "repetition", "perplexity", "anchor_nearest", "score")
PLACES = (" therefore", " seven", " add", " first", " equals", " apples", " cost", " north", "\n", " blue")


def example(steps: int = 40, seeds: int = 3, strategies: tuple[str, ...] = STRATEGIES) -> dict[str, Any]:
    """The content of a results.json; one run of the last of several strategies has failed."""
    draw = random.Random(7)
    runs = []
    for name in strategies:
        for seed in range(seeds):
            broken = name == "gumbel" and seed == 2
            runs.append(_run(draw, name, seed, steps, broken))
    return {
        "format": 1,
        "created": "2025-11-21T09:30:00+00:00",
        "command": shlex.split(f"ngrpo compare --perturbations none,neighbor --seeds 0,1,2 --task arithmetic {MODEL}"),
        "baseline": "none",
        "model": MODEL,
        "task": "arithmetic",
        "hardware": "cpu",
        "machine": MACHINE,
        "versions": VERSIONS,
        "openrlhf_args": ["--actor.model_name_or_path", MODEL],
        "strategies": [
            {
                "id": name,
                "perturbation": _spec(name),
                "base": "grpo",
                "settings": {} if name == "none" else {"perturbation.rate": "0.1"},
                "paper": "2606.10768",
            }
            for name in strategies
        ],
        "runs": runs,
        "untrained": {"n": 8, "mean_at_n": 0.131, "pass_at_k": {"1": 0.131, "2": 0.22, "4": 0.341, "8": 0.484}},
        "summary": [_summary(name, [run for run in runs if run["strategy"] == name], seeds) for name in strategies],
        "diagnosis": diagnosis(strategies),
    }


def diagnosis(strategies: tuple[str, ...] = STRATEGIES) -> dict[str, Any]:
    """The content of a diagnosis.json, with samples and an embedding map."""
    draw = random.Random(11)
    entries = []
    for name in strategies:
        _, _, diverse, valid = _character(name)
        entries.append(
            {
                "name": name,
                "perturbation": _spec(name),
                "reward": round(0.5 * valid, 4),
                "pass_at_k": {str(k): round(1 - (1 - 0.42 * valid) ** (k ** (0.6 + diverse)), 4) for k in KS},
                "diversity": dict.fromkeys(DIVERSITY, diverse),
                "validity": dict.fromkeys(VALIDITY, valid),
                "learnable_groups": 0.35 + diverse / 2,
                "relative_shift": None if name == "none" else 0.3 * diverse,
                "rate": (_spec(name) or {}).get("rate", 0.0),
                "tokens_per_second": 410.0 + draw.uniform(-20, 20),
                "record_bytes_per_token": None if name == "none" else 1.8,
                "intervals": {
                    "diversity": [diverse - 0.03, diverse + 0.035],
                    "validity": [valid - 0.025, valid + 0.02],
                    "reward": [0.5 * valid - 0.05, 0.5 * valid + 0.05],
                },
            }
        )
    return {
        "format": 1,
        "model": MODEL,
        "dataset": "gsm8k",
        "group": 8,
        "prompts": 64,
        "sampling": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 160, "seed": 0},
        "versions": VERSIONS,
        "machine": MACHINE,
        "seconds": 512.4,
        "baseline": "none" if "none" in strategies else None,
        "strategies": entries,
        "warnings": ["gumbel: 31% of the answers end in a loop"] if "gumbel" in strategies else [],
        "samples": _samples(draw, strategies),
        "embedding_map": _map(draw, strategies),
    }


def _character(name: str) -> tuple[float, float, float, float]:
    return CHARACTER.get(name, (10.0, 0.8, 0.35, 0.8))


def _spec(name: str) -> dict[str, Any] | None:
    return SPECS.get(name, {"name": name.split()[0], "rate": 0.1})


def _run(draw: random.Random, name: str, seed: int, steps: int, broken: bool) -> dict[str, Any]:
    pace, top, _, valid = _character(name)
    lag = draw.gauss(0, 2.5)
    rows = []
    for step in range(1, (12 if broken else steps) + 1):
        x = 40 * step / max(steps, 20)
        reward = 0.14 + (top - 0.14) / (1 + math.exp(-(x - pace - lag) / 4)) + draw.gauss(0, 0.045)
        row = {
            "step": step,
            "reward": round(min(max(reward, 0), 1) * 32) / 32,
            "tokens_per_second": 120 + draw.gauss(0, 6),
            "step_seconds": 11 + draw.gauss(0, 0.4),
            "gap_plain_mean": 0.038 + draw.gauss(0, 0.002),
        }
        if name != "none":
            rate = (_spec(name) or {})["rate"]
            row |= {
                "rate": rate + (draw.gauss(0, 0.008) if rate < 1 else 0),
                "shift": 0.3 * (1 - valid) + 0.02 + draw.gauss(0, 0.003),
                "gap_perturbed_mean": 0.03 + draw.gauss(0, 0.003),
                "record_bytes_per_token": 1.8,
            }
        rows.append(row)
    right = [sum(draw.random() < top * (0.4 + 0.6 * ((i * 37) % 64) / 64) for _ in range(8)) for i in range(64)]
    return {
        "id": f"{name}-{seed}".replace(" ", "_"),
        "strategy": name,
        "seed": seed,
        "status": "failed" if broken else "done",
        "error": "Traceback (most recent call last):\nMemoryError: 'gumbel' <ran> out of memory" if broken else None,
        "log": f"runs/{name}-{seed}/train.log".replace(" ", "_"),
        "seconds": 11.2 * steps + draw.uniform(30, 50),
        "steps": rows,
        "evaluations": [
            {"step": row["step"], "mean_at_n": 0.62 * row["reward"]} for row in rows if row["step"] % 10 == 0
        ],
        "peak_memory_bytes": None if broken else int(6.1e9 + draw.uniform(0, 3e8)),
        "evaluation": None
        if broken
        else {
            "n": 8,
            "mean_at_n": sum(right) / 512,
            "pass_at_k": {str(k): sum(c > 8 - k or draw.random() < c / 8 * k / 2 for c in right) / 64 for k in KS},
            "problems": [{"id": str(i), "n": 8, "correct": c} for i, c in enumerate(right)],
        },
    }


def _around(value: float, half: float, seeds: int) -> dict[str, Any]:
    over = "seeds" if seeds > 1 else "problems"
    return {"value": value, "low": value - half, "high": value + half * 0.9, "over": over}


def _summary(name: str, runs: list[dict[str, Any]], seeds: int) -> dict[str, Any]:
    _, top, diverse, _ = _character(name)
    mean = 0.62 * top
    gain = mean - 0.62 * CHARACTER["none"][1]
    wins = {str(k): 1 - (1 - mean) ** (k ** (0.5 + diverse / 2)) for k in KS}
    plain = {str(k): 1 - (1 - 0.62 * CHARACTER["none"][1]) ** (k ** (0.5 + CHARACTER["none"][2] / 2)) for k in KS}

    def change(value: float, half: float) -> dict[str, Any]:
        found = {**_around(value, half, seeds), "within_noise": value - half <= 0 <= value + half * 0.9, "seeds": seeds}
        if seeds == 1:
            return {**found, "p": None, "spread": None}
        spread = {"spread": half / 2.484, "p": 0.014, "p_corrected": 0.042, "comparisons": 3}
        return {**found, **spread, "detectable": 1.5 * half}

    sign = "better" if gain > 0 else "worse"
    verdict = (
        "the baseline"
        if name == "none"
        else "within noise of none in Mean@8 and Pass@8; the runs do not tell them apart"
        if abs(gain) < 0.03
        else f"{sign} than none in Mean@8 by {abs(gain):.3f}, beyond noise; Pass@8 within noise"
    )
    base = name == "none"
    if seeds == 1 and not base:
        verdict = f"Mean@8 {gain:+.3f} over problems against none, but one seed is too few to tell a method from luck"
    return {
        "strategy": name,
        "seeds": [run["seed"] for run in runs if run["status"] == "done"],
        "failed": [run["seed"] for run in runs if run["status"] == "failed"],
        "n": 8,
        "reward_first": _around(0.142, 0.02, seeds),
        "reward_last": _around(top, 0.03, seeds),
        "reward_change": _around(top - 0.142, 0.04, seeds),
        "mean_at_n": _around(mean, 0.026, seeds),
        "pass_at_k": {k: _around(value, 0.03, seeds) for k, value in wins.items()},
        "difference": None
        if base
        else {"mean_at_n": change(gain, 0.03), "pass_at_k": {k: change(wins[k] - plain[k], 0.04) for k in wins}},
        "verdict": verdict,
        "cost": {
            "tokens_per_second": {"value": 118.4, "ratio": 1.0 if base else 0.9785},
            "step_seconds": {"value": 11.21, "ratio": 1.0 if base else 1.0172},
            "memory_bytes": {"value": 6.2e9, "ratio": 1.0 if base else 1.0177},
            "record_bytes_per_token": {"value": None if base else 1.8},
        },
    }


PROBLEMS = (
    (
        "Natalia sold clips to 48 friends in April, and half as many in May. How many clips did Natalia sell?",
        "72",
        "First , we find the clips sold in May : 48 / 2 = 24 .\n"
        "Then we add the clips of April and May : 48 + 24 = 72 .\n"
        "Therefore , Natalia sold 72 clips altogether .",
    ),
    (
        "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?",
        "3",
        "The robe takes 2 bolts of blue fiber .\nHalf of 2 is 1 , so it takes 1 bolt of white fiber .\n"
        "In total that is 2 + 1 = 3 bolts .",
    ),
    ("What is 17 + 25?", "42", "Start with the tens : 10 + 20 = 30 .\nThe ones : 7 + 5 = 12 .\n30 + 12 = 42 ."),
)


def _tokens(text: str) -> list[str]:
    return [f" {word}" for word in text.replace("\n", " \n ").split(" ")]


def _samples(draw: random.Random, strategies: tuple[str, ...]) -> list[dict[str, Any]]:
    found = []
    for problem, answer, text in PROBLEMS:
        columns = []
        for name in strategies:
            rate = (_spec(name) or {}).get("rate", 0.0)
            tokens = []
            for shown in _tokens(text):
                one: dict[str, Any] = {"text": shown, "perturbed": draw.random() < rate * 1.6}
                if one["perturbed"] and name.startswith("gaussian"):
                    one |= {"candidates": [[shown, 1.0]], "sigma": 0.0312}
                elif one["perturbed"]:
                    rest = 1 - draw.uniform(0.45, 0.9)
                    one["candidates"] = [[shown, 1 - rest], [f"{shown}s", rest * 0.7], [shown.upper(), rest * 0.3]]
                tokens.append(one)
            columns.append({"strategy": name, "reward": float(draw.random() < 0.8), "tokens": tokens})
        found.append({"problem": problem, "answer": answer, "by_strategy": columns})
    return found


def _map(draw: random.Random, strategies: tuple[str, ...]) -> dict[str, Any]:
    tokens = []
    for i, text in enumerate(PLACES):
        angle = 2 * math.pi * i / len(PLACES)
        radius = 1.1 + 0.5 * (i % 3)
        tokens.append({"id": 300 + i, "text": text, "x": radius * math.cos(angle), "y": 0.8 * radius * math.sin(angle)})
    perturbations = []
    for name in strategies:
        if name == "none":
            continue
        wide = 0.14 if name == "neighbor rate=0.1" else 0.42
        points = []
        for i, one in enumerate(tokens):
            for _ in range(40):
                off = draw.gauss(0, wide), draw.gauss(0, wide)
                related = math.hypot(*off) < 0.55
                near = f"{one['text']}s" if related else draw.choice((" ##", "ق", " 😀", " lorem"))
                nearest = one["text"] if math.hypot(*off) < 0.2 else near
                place = {"x": one["x"] + off[0], "y": one["y"] + off[1]}
                points.append({"token": i, **place, "nearest": nearest, "related": related})
        far = sum(not point["related"] for point in points) / len(points)
        changed = sum(point["nearest"] != tokens[point["token"]]["text"] for point in points) / len(points)
        perturbations.append({"strategy": name, "points": points, "unrelated_share": far, "changed_share": changed})
    neighbors = [
        {"token": i, "text": near, "x": one["x"] + 0.3 * math.cos(2 * j), "y": one["y"] + 0.3 * math.sin(2 * j)}
        for i, one in enumerate(tokens)
        for j, near in enumerate((f"{one['text']}s", one["text"].upper(), f"{one['text']}ly"))
    ]
    return {
        "metric": "cosine",
        "tokens": tokens,
        "neighbors": neighbors,
        "perturbations": perturbations,
        "explained_variance": [0.31, 0.18],
    }


def groups(strategy: str = "neighbor rate=0.1", steps: int = 3, answers: int = 8) -> list[dict[str, Any]]:
    """Kept steps as `ngrpo.trainers.openrlhf.kept_groups` writes them: two prompts each, some answers the same."""
    draw = random.Random(5)
    kept = []
    for step in range(1, steps + 1):
        rewards = [float(draw.random() < 0.2 * step) for _ in range(4 * answers)]
        found = []
        for number, (problem, _, text) in enumerate(PROBLEMS[:2]):
            group = []
            for i in range(answers):
                tokens = _tokens(text)[: 30 - 2 * (i % 4)]
                at = [place for place in range(len(tokens)) if draw.random() < 0.15]
                mixtures = [
                    [place, {"candidates": [[tokens[place], 0.75], [" thus", 0.2], ["\n", 0.05]]}] for place in at
                ]
                group.append(
                    {
                        "reward": rewards[number * answers + i],
                        "advantage": round(draw.gauss(0, 1), 4),
                        "tokens": tokens,
                        "gaps": [round(abs(draw.gauss(0, 1e-3)), 6) for _ in tokens],
                        "fed": mixtures if strategy != "none" else [],
                        **({"cut": 41} if i == 3 else {}),
                    }
                )
            found.append(
                {
                    "prompt": problem,
                    "diversity": {"different": 4.0, "distinct_2": 0.31, "common_prefix": 12.5},
                    "answers": group,
                }
            )
        kept.append({"step": 10 * step - 9, "rewards": rewards, "size": answers, "groups": found})
    return kept
