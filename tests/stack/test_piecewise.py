# SPDX-License-Identifier: Apache-2.0
"""vLLM's own compilation, split at the attention as on CUDA, by Inductor for a CPU: once new, once from its cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.own_process import result_of

SPEC = {"name": "gaussian", "rate": 0.5}


def engine_of(folder: str, spec: dict[str, Any]) -> dict[str, Any]:
    return result_of("tests.stack.piecewise_rollout", folder, json.dumps(spec), timeout=600)


def test_a_graph_in_pieces_feeds_the_override_new_and_from_the_cache(
    random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    new, cached = engine_of(random_model, SPEC), engine_of(random_model, {**SPEC, "seed": 1})
    assert new["num_piecewise_graphs_seen"] > new["num_piecewise_capturable_graphs_seen"] > 1
    assert new["num_backend_compilations"] > 1 and cached["num_backend_compilations"] == 0
    for found in (new, cached):
        assert found["edits"] > 80
        assert found["gap"] <= 1e-4
        assert found["without"] >= 1e-2
    assert new["tokens"] != cached["tokens"], "engines that differ in the seed share a graph, and draw other tokens"
