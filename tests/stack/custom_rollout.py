# SPDX-License-Identifier: Apache-2.0
"""Run by test_custom.py: perturbations and gates of a user, in engine and Ray processes that cannot see their files.

Arguments: what to run, the model, where the result goes. The working directory holds their files, which are deleted
once the specs are made. Results are pickled.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

OWN = "theirs/custom_perturbation.py"
GATE = "theirs/custom_gate.py"
OPTIONS = {"rate": 0.8, "share": 0.4, "gate": GATE, "gate.half_life": 20.0}


def spec_of_deleted_files() -> dict[str, Any]:
    """The spec of a perturbation and a gate whose files are gone."""
    from perturbations import create

    spec = create(OWN, **OPTIONS).spec()
    shutil.rmtree("theirs")
    return spec


def in_engine(model: str) -> dict[str, Any]:
    """An engine core with its worker in a fresh process; then that of an installed package, in the same one."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM

    from ngrpo.rollout import set_perturbation
    from perturbations import create
    from tests.stack.harness import chat_prompts, sample

    spec = spec_of_deleted_files()
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


def in_ray(model: str) -> dict[str, Any]:
    """An actor that makes the perturbation from the environment that a run's workers get."""
    import ray

    from ngrpo.config.run import RunConfig, begin
    from ngrpo.machine.hardware import profile_for
    from ngrpo.trainers.openrlhf.launch import setup_hook, worker_env
    from ngrpo.trainers.openrlhf.rollout_actor import engine_spec
    from perturbations import create

    spec = spec_of_deleted_files()
    run = RunConfig(specs={"perturbation": spec})
    everywhere = {
        "env_vars": worker_env(profile_for("cpu")),
        "worker_process_setup_hook": setup_hook(("cpu", "perturbation"), run),
    }

    @ray.remote(num_cpus=0)
    class Actor:
        def look(self, pickled: Any) -> dict[str, Any]:
            # Imported here: of this function's own Ray would pickle a bound method, and with it the whole registry.
            from perturbations import create as create_here
            from perturbations.testing import check_perturbation

            perturbation = create_here(**engine_spec(3))
            check_perturbation(perturbation)
            return {"process": os.getpid(), "seen": perturbation.fingerprint(), "pickled": pickled.fingerprint()}

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=everywhere)
    perturbation = create(**spec)
    result = ray.get(Actor.remote().look.remote(perturbation))
    ray.shutdown()
    begin(run)
    result |= {"other process": result["process"] != os.getpid(), "expected": create(**engine_spec(3)).fingerprint()}
    return {**result, "expected pickled": perturbation.fingerprint()}


if __name__ == "__main__":
    run = {"engine": in_engine, "ray": in_ray}[sys.argv[1]]
    Path(sys.argv[3]).write_bytes(pickle.dumps(run(sys.argv[2])))
