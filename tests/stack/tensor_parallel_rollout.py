# SPDX-License-Identifier: Apache-2.0
"""Run by test_tensor_parallel.py, in a process without another engine: prints what two ranks gave, as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"


def drop_on_the_second_rank(worker: Any) -> None:
    """Called in each worker: overrides of one of them are lost from here on."""
    from ngrpo.rollout.input_override import InputOverride

    if worker.rank == 1:
        InputOverride.put = lambda *_given, **_named: None


def main(folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from ngrpo.rollout import startup_check
    from ngrpo.rollout.startup_check import ProbeFailure
    from perturbations.neighbors import ExactIndex
    from tests.stack.harness import build_engine, gaps, sample

    spec = {"name": "neighbor", "rate": 0.5, "variant": "released"}
    llm = build_engine(folder, spec, tensor_parallel_size=2, distributed_executor_backend="mp")
    fingerprints = llm.llm_engine.collective_rpc("perturbation_fingerprint")
    prompts = [list(range(100 * i, 100 * i + 20)) for i in range(1, 5)]
    rollouts = sample(llm, prompts, max_tokens=32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.cat([torch.from_numpy(r.record.ids.astype("int64")) for r in rollouts])
    nearest, _ = ExactIndex(model.get_output_embeddings().weight).query(ids[:, 0], 2)  # as released: the output's
    result = {
        "ranks": len(fingerprints),
        "specs": len(set(fingerprints)),
        "edits": sum(len(r.record) for r in rollouts),
        "same_neighbors": torch.equal(ids[:, 1:], nearest),
        "gap": gaps(model, rollouts).max().item(),
        "without": gaps(model, rollouts, replay=False).max().item(),
    }
    core = llm.llm_engine.engine_core.engine_core
    result["seconds"] = startup_check.prove(core)
    core.collective_rpc(drop_on_the_second_rank)
    try:
        startup_check.prove(core)
    except ProbeFailure as error:
        result["failure"] = str(error)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
