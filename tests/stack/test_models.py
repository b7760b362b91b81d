# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every form of embedding, in stock vLLM and replayed in transformers, as docs/models.md has them."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models.case import verdict
from tests.support.own_process import NO_VISION, result_of, run_module, with_vision

FORMS = {
    "plain": "qwen3",
    "scaled": "gemma3_text",
    "multiplied": "granite",
    "Transformers backend": "smollm3",
    "multimodal": "gemma3",
    "per-layer": "gemma4_text",
    "hybrid": "falcon_h1",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By model type, what ``python -m benchmarks.models`` measured. The engines are forked from one process."""
    target = tmp_path_factory.mktemp("models") / "rows.jsonl"
    arguments = [*FORMS.values(), "--json", str(target)]
    with suppress(AssertionError):  # its exit status says whether all are right, and each test below looks at one
        run_module("benchmarks.models", *arguments, env=with_vision())
    by_type = {}
    for line in target.read_text().splitlines():
        row = json.loads(line)
        by_type[row["type"]] = row
    return by_type


@pytest.mark.parametrize("form", FORMS)
def test_the_replay_is_exact_whatever_the_form_of_the_embedding(form: str, rows: dict[str, Any]) -> None:
    row = rows[FORMS[form]]
    if form == "multimodal" and NO_VISION:
        pytest.skip("torchvision is missing: make vision")
    assert row["verdict"] == "right", row
    if row["dtype"] == "float32":
        assert max(row["perturbed"].values()) <= max(1e-4, 1.5 * row["unperturbed"])
    assert row["edits"] > 200
    assert row["unreplayed"] > 0.1
    if form == "Transformers backend":
        assert row["engine_class"] == "TransformersForCausalLM"


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ((2e-6, 5.0, 5.0), "wrong"),
        ((2.8e-4, 3.7e-4, 5.0), "right"),
        ((2.8e-4, 4.3e-4, 5.0), "wrong"),
        ((2e-6, float("nan"), 5.0), "wrong"),
        ((2e-6, 9e-5, 1e-4), "insensitive"),
    ],
)
def test_what_counts_as_right(figures: tuple[float, float, float], expected: str) -> None:
    """The figures are the gaps of a rollout that is unperturbed, of one that is replayed, and of one that is not."""
    assert verdict("float32", *figures) == expected
    assert verdict("bfloat16", 1e-5, 9e-5, 5.0) == "wrong", "the tolerance of float32 does not apply to bfloat16"


@pytest.mark.skipif(NO_VISION, reason="torchvision is missing: make vision")
def test_the_replay_behind_a_picture_is_exact(tmp_path: Path) -> None:
    target = tmp_path / "rows"
    run_module("benchmarks.models.picture_rollouts", "qwen3_vl", "--json", str(target), env=with_vision())
    row = json.loads(target.read_text())
    assert row["unperturbed"][0] < 1e-4, row
    assert row["perturbed"][0] < 1e-4, row
    assert row["unreplayed"][0] > 0.1, row


@pytest.mark.skipif(NO_VISION, reason="torchvision is missing: make vision")
def test_an_adapter_of_an_image_text_model_is_merged() -> None:
    result = result_of("tests.stack.picture_adapter", env=with_vision())
    assert result["difference"] < 1e-4 < result["logits"]
    assert "processor_config.json" in result["files"]


@pytest.mark.slow
def test_in_float32_no_token_is_routed_otherwise() -> None:
    output = run_module("benchmarks.routing", "qwen3_moe", "--dtype", "float32", "--print").stdout
    table_rows = [line for line in output.splitlines() if "| qwen3_moe |" in line]  # DeepSpeed prints lines, too
    assert len(table_rows) == 2, output
    for table_row in table_rows:
        assert table_row.count(" 0 of 768 ") == 2, output
