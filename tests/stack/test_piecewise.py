# SPDX-License-Identifier: Apache-2.0
"""vLLM's own compilation, split at the attention as on CUDA, by Inductor for a CPU: once new, once from its cache.

Each engine runs in a process of its own, whose program is this file.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.own_process import RESULT, result_of

SPEC = {"name": "gaussian", "rate": 0.5}


def compiled_engine(folder: str, spec: dict[str, Any]) -> dict[str, Any]:
    """The result of :func:`main` with this perturbation."""
    return result_of("tests.stack.test_piecewise", folder, json.dumps(spec))


def test_a_graph_in_pieces_feeds_the_override_new_and_from_the_cache(
    random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    new = compiled_engine(random_model, SPEC)
    cached = compiled_engine(random_model, {**SPEC, "seed": 1})
    assert new["num_piecewise_graphs_seen"] > new["num_piecewise_capturable_graphs_seen"] > 1
    assert new["num_backend_compilations"] > 1
    assert cached["num_backend_compilations"] == 0
    for engine in (new, cached):
        assert engine["edits"] > 80
        assert engine["gap"] <= 1e-4
        assert engine["unreplayed_gap"] >= 1e-2
    assert new["tokens"] != cached["tokens"], "engines that differ in the seed share a graph, and draw other tokens"


def main(folder: str, perturbation: str) -> None:
    """Prints vLLM's counts of compilations, and how an engine's rollouts are replayed."""
    from vllm.compilation.counter import compilation_counter

    from tests.stack import as_on_cuda
    from tests.stack.harness import build_engine, gaps, load_in_float32, sample

    with as_on_cuda.in_pieces():
        llm = build_engine(folder, json.loads(perturbation), enforce_eager=False)
    prompts = [list(range(start, start + 20)) for start in range(100, 900, 100)]
    rollouts = sample(llm, prompts, max_tokens=32)
    model = load_in_float32(folder)
    result = {
        **vars(compilation_counter),
        "edits": sum(len(rollout.record) for rollout in rollouts),
        "gap": gaps(model, rollouts).max().item(),
        "unreplayed_gap": gaps(model, rollouts, replay=False).max().item(),
        "tokens": [rollout.tokens for rollout in rollouts],
    }
    print(RESULT + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
