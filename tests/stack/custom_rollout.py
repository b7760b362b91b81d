# SPDX-License-Identifier: Apache-2.0
"""Run by test_custom.py: perturbations and gates of a user, in an engine's process that cannot see their files.

Arguments: the model, where the result goes. The working directory holds the user's files, which are deleted
once the specs are made. Results are pickled.
"""

import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

OWN = "theirs/custom_perturbation.py"
GATE = "theirs/custom_gate.py"
OPTIONS = {"rate": 0.8, "share": 0.4, "gate": GATE, "gate.half_life": 20.0}


def in_engine(model: str) -> dict[str, Any]:
    """Rollouts of an engine whose core and worker are a fresh process: of the file, then of the installed package."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM

    from ngrpo.rollout import set_perturbation
    from perturbations import create
    from tests.stack.harness import chat_prompts, sample

    spec = create(OWN, **OPTIONS).spec()
    shutil.rmtree("theirs")
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 26,
        disable_log_stats=True,
        distributed_executor_backend="uni",
        additional_config={"perturbation": spec},
    )
    prompts = chat_prompts(llm)
    result = {
        "other process": type(llm.llm_engine.engine_core).__name__ == "SyncMPClient",
        "expected": create(**spec).fingerprint(),
        "seen": llm.llm_engine.collective_rpc("perturbation_fingerprint"),
        "file": sample(llm, prompts, max_tokens=32),
    }
    set_perturbation(llm, "installed_runner_up", rate=0.5, share=0.4)
    result["installed"] = sample(llm, prompts, max_tokens=32)
    return result


if __name__ == "__main__":
    model, target = sys.argv[1:]
    result = in_engine(model)
    Path(target).write_bytes(pickle.dumps(result))
