# SPDX-License-Identifier: Apache-2.0
"""Run by test_tarpo.py, in a process that only it sets up: rollouts with TARPO in either model runner, pickled.

Arguments: V1 or V2, the model's folder, where the result goes. Scheduling is asynchronous, as on CUDA.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

RUNNER = sys.argv[1]
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(RUNNER == "V2"))

from tests.stack import as_on_cuda  # noqa: E402

if RUNNER == "V2":
    as_on_cuda.interpret_triton()

from tests.stack.harness import QUESTIONS, build_engine, chat_prompts, sample  # noqa: E402
from tests.stack.routed import TEMPERATURE, decisions, shaken  # noqa: E402
from tests.stack.scheduling import worker_of  # noqa: E402


def main(model: str, target: str) -> None:
    """Six tokens of three requests, whose prefills are in chunks of at most 64 tokens."""
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 256, "enable_prefix_caching": True}
    with as_on_cuda.asynchronous():
        llm = build_engine(model, {"name": "tarpo"}, **options)
        shaken(worker_of(llm).perturbation.module)
        prompts = chat_prompts(llm, QUESTIONS[:3])
        with decisions() as seen:
            rollouts = sample(llm, prompts, max_tokens=6, temperature=TEMPERATURE)
        result = {
            "runner": llm.llm_engine.collective_rpc("perturbation_runner"),
            "asynchronous": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
            "rollouts": rollouts,
            "seen": seen,
        }
    Path(target).write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[2:])
    # vLLM's engines and Triton's interpreter do not end well together with the interpreter of Python.
    sys.stdout.flush()
    os._exit(0)
