# SPDX-License-Identifier: Apache-2.0
"""docs/clusters.md names the smallest card with QLoRA as the project's own planning does."""

import pytest

from benchmarks import qlora_cards
from ngrpo.machine.models import architecture
from tests.fast.benchmarks.test_smallest_cards import row_of


def test_every_model_has_its_row() -> None:
    for model in architecture.size_table():
        assert len(row_of(f"{model} with QLoRA")) == 4


@pytest.mark.more
@pytest.mark.parametrize("model", ["Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B"])
def test_the_smallest_cards_are_planned_by_this_tree(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openrlhf")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    message = "python -m benchmarks.qlora_cards prints the table"
    assert row_of(f"{model} with QLoRA") == qlora_cards.cells(model), message
