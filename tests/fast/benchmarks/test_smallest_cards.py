# SPDX-License-Identifier: Apache-2.0
"""docs/clusters.md names the smallest card for each model as the project's own planning does."""

import pytest

from benchmarks import smallest_cards
from ngrpo.machine.models import architecture
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")


def row_of(model: str) -> list[str]:
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {model} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_every_model_has_its_row() -> None:
    for model in architecture.size_table():
        assert len(row_of(model)) == len(row_of(f"{model} with LoRA")) == len(row_of(f"{model} with QLoRA")) == 4


@pytest.mark.more
@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B"])
def test_the_smallest_cards_are_planned_by_this_tree(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openrlhf")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert row_of(model) == smallest_cards.plain_cells(model), "python -m benchmarks.smallest_cards prints the table"
    assert row_of(f"{model} with LoRA") == smallest_cards.adapter_cells(model, smallest_cards.LORA)
    assert row_of(f"{model} with QLoRA") == smallest_cards.adapter_cells(model, smallest_cards.QLORA)
