# SPDX-License-Identifier: Apache-2.0
"""`ngrpo eval` and `ngrpo diagnose` draw as rollouts of a training would: noise on the weights, a schedule. Slow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ngrpo.commands import diagnose
from ngrpo.commands import eval as evaluation

pytestmark = [pytest.mark.stack, pytest.mark.slow]
# float32, so that a batch of another composition does not round a token away.
COMMON = "--task arithmetic --max-tokens 12 --temperature 1"


def evaluated(smollm2: str, out: Path, words: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The texts of four problems with four answers each, and the result."""
    command = f"--model {smollm2} {COMMON} --limit 4 --n 4 --vllm.dtype float32 --out {out} {words}".split()
    assert evaluation.run(command, report=print) == 0
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    texts = {f"{row['problem']} {row['sample']}": row["text"] for row in lines}
    return texts, json.loads((out / "evaluation.json").read_text())


def test_evaluation(smollm2: str, tmp_path: Path) -> None:
    """A schedule that changes nothing changes no answer; one that begins late, no short answer; noise changes them."""
    ladder, ead = "--sampling.schedule ladder --sampling.schedule", "--sampling.schedule ead --sampling.schedule"
    same, _ = evaluated(smollm2, tmp_path / "same", f"{ladder}.least 1 --sampling.schedule.most 1")
    late, result = evaluated(smollm2, tmp_path / "late", f"{ead}.c 3 --sampling.schedule.tau_max 5")
    assert result["sampling_schedule"]["c"] == 3
    assert same != late, "hot from the fourth token on"
    first = {key: text[:2] for key, text in same.items()}
    assert {key: text[:2] for key, text in late.items()} == first, "three tokens are two letters and more"
    noisy, result = evaluated(smollm2, tmp_path / "noisy", "--policy_noise psn --policy_noise.sigma 0.05")
    assert result["sigma"] == 0.05
    assert sum(noisy[key] != text for key, text in same.items()) > 8


def test_diagnosis(smollm2: str, tmp_path: Path) -> None:
    strategies = ["none", "none sampling.schedule=ead sampling.schedule.tau_max=3"]
    strategies += ["none policy_noise=psn policy_noise.sigma=0.05"]
    words = f"--model {smollm2} {COMMON} --prompts 2 --group 4 --dtype float32 --out {tmp_path}".split()
    for strategy in strategies:
        words += ["--strategy", strategy]
    assert diagnose.run(words, report=print) == 0
    rows = json.loads((tmp_path / "diagnosis.json").read_text())["strategies"]
    assert len(rows) == 3
    texts: dict[str, list[str]] = {}
    for line in (tmp_path / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        texts.setdefault(sample["strategy"], []).append(sample["text"])
    plain, *others = texts.values()
    assert len(texts) == 3 and all(len(found) == 8 for found in texts.values())
    assert all(plain != other for other in others)
    by_name = {row["name"]: row["validity"]["perplexity"] for row in rows}
    assert all(by_name[name] > by_name["none"] for name in by_name if name != "none"), "under the clean weights"
