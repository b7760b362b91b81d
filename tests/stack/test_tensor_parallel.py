# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks: both draw the same tokens and edits, and the replay is exact.

Their engine is in a process of its own, which runs this file.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.own_process import RESULT, result_of
from tests.support.tiny_folder import tiny_folder


def test_two_ranks(tmp_path: Path, smollm2: str) -> None:
    """Of a vocabulary that the ranks do not divide evenly: the second has rows of padding."""
    options = {"vocab_size": 49155, "tie_word_embeddings": False, "initializer_range": 0.2}
    seen = result_of("tests.stack.test_tensor_parallel", tiny_folder(tmp_path, smollm2, "llama", **options))
    assert (seen["ranks"], seen["specs"]) == (2, 1)
    assert seen["edits"] > 30
    assert seen["same_neighbors"], "each rank looks among its own rows, and they share what they find"
    assert seen["gap"] <= 1e-4
    assert seen["without"] > 1e-2
    assert seen["seconds"] > 0, "a sound engine proves itself again, as after a weight sync"
    assert "does not feed" in seen["failure"] and "off by" in seen["failure"], "one rank lost its overrides"


def drop_on_the_second_rank(worker: Any) -> None:
    """Called in each worker: overrides of one of them are lost from here on."""
    from ngrpo.rollout.input_override import PLAIN, InputOverride

    original = InputOverride.lay_out
    if worker.rank == 1:
        InputOverride.lay_out = lambda self, sources, upload: original(self, sources * 0 + PLAIN, upload)


def main(folder: str) -> None:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    import torch

    from ngrpo.rollout import startup_check
    from ngrpo.rollout.check_texts import CheckFailure
    from perturbations.neighbors import ExactIndex
    from tests.stack.harness import build_engine, gaps, load_in_float32, sample

    spec = {"name": "neighbor", "rate": 0.5, "variant": "released"}
    llm = build_engine(folder, spec, tensor_parallel_size=2, distributed_executor_backend="mp")
    fingerprints = llm.llm_engine.collective_rpc("perturbation_fingerprint")
    prompts = [list(range(100 * i, 100 * i + 20)) for i in range(1, 5)]
    rollouts = sample(llm, prompts, max_tokens=32)
    model = load_in_float32(folder)
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
    result["seconds"] = startup_check.check_core(core)
    core.collective_rpc(drop_on_the_second_rank)
    try:
        startup_check.check_core(core)
    except CheckFailure as error:
        result["failure"] = str(error)
    print(RESULT + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
