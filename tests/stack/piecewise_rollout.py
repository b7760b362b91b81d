# SPDX-License-Identifier: Apache-2.0
"""Run by test_piecewise.py, in a process of its own: an engine that vLLM compiles in pieces; prints JSON."""

from __future__ import annotations

import json
import sys


def main(folder: str, perturbation: str) -> None:
    from vllm.compilation.counter import compilation_counter

    from tests.stack import as_on_cuda
    from tests.stack.harness import build_engine, gaps, load_in_float32, sample

    with as_on_cuda.in_pieces():
        llm = build_engine(folder, json.loads(perturbation), enforce_eager=False)
    rollouts = sample(llm, [list(range(100 * i, 100 * i + 20)) for i in range(1, 9)], max_tokens=32)
    model = load_in_float32(folder)
    result = {
        **vars(compilation_counter),
        "edits": sum(len(each.record) for each in rollouts),
        "gap": gaps(model, rollouts).max().item(),
        "without": gaps(model, rollouts, replay=False).max().item(),
        "tokens": [each.tokens for each in rollouts],
    }
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
