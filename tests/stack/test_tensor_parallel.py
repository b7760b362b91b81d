# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks: both draw the same tokens and edits, and the replay is exact.

Their engine runs in a process of its own, whose program is this file.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.own_process import RESULT, result_of
from tests.support.tiny_folder import tiny_folder


def test_two_ranks(tmp_path: Path, smollm2: str) -> None:
    """The ranks do not divide the vocabulary evenly, so that the second rank has rows of padding."""
    folder = tiny_folder(
        tmp_path,
        smollm2,
        "llama",
        vocab_size=49155,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    result = result_of("tests.stack.test_tensor_parallel", folder)
    assert result["ranks"] == 2
    assert result["specs"] == 1
    assert result["edits"] > 30
    assert result["same_neighbors"], "each rank looks among its own rows, and they share what they find"
    assert result["gap"] <= 1e-4
    assert result["unreplayed_gap"] > 1e-2
    assert result["seconds"] > 0, "a sound engine passes the start-up check again, as after a weight sync"
    assert "does not feed" in result["failure"], "one rank lost its overrides"
    assert "off by" in result["failure"]


def drop_on_the_second_rank(worker: Any) -> None:
    """Called in each worker: the second rank feeds no override from here on."""
    from ngrpo.rollout.input_override import PLAIN, InputOverride

    original = InputOverride.lay_out
    if worker.rank == 1:
        InputOverride.lay_out = lambda self, sources, upload: original(self, sources * 0 + PLAIN, upload)


def main(folder: str) -> None:
    """Prints what the ranks drew, how it is replayed, and what the start-up check says before and after a fault."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    import torch

    from ngrpo.rollout import startup_check
    from ngrpo.rollout.check_texts import CheckFailure
    from perturbations.neighbors import ExactIndex
    from tests.stack.harness import build_engine, gaps, load_in_float32, sample

    spec = {"name": "neighbor", "rate": 0.5, "variant": "released"}
    llm = build_engine(folder, spec, tensor_parallel_size=2, distributed_executor_backend="mp")
    fingerprints = llm.llm_engine.collective_rpc("perturbation_fingerprint")
    prompts = [list(range(start, start + 20)) for start in range(100, 500, 100)]
    rollouts = sample(llm, prompts, max_tokens=32)
    model = load_in_float32(folder)
    ids = torch.cat([torch.from_numpy(rollout.record.ids.astype("int64")) for rollout in rollouts])
    # The released variant looks for neighbors in the output embedding.
    index = ExactIndex(model.get_output_embeddings().weight)
    nearest, _ = index.query(ids[:, 0], 2)
    result = {
        "ranks": len(fingerprints),
        "specs": len(set(fingerprints)),
        "edits": sum(len(rollout.record) for rollout in rollouts),
        "same_neighbors": torch.equal(ids[:, 1:], nearest),
        "gap": gaps(model, rollouts).max().item(),
        "unreplayed_gap": gaps(model, rollouts, replay=False).max().item(),
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
