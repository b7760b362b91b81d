# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's engine of two tensor-parallel ranks, which vLLM places by Ray, in a run's own Ray.

Engine and Ray are started as `ngrpo train` starts them on CUDA, except for the devices: Ray's GPUs are declared, and
ray_on_cpu/ is on PYTHONPATH. The engine is in a process of its own, which runs this file.
"""

import json
import os
import sys
from pathlib import Path

import ray

from ngrpo.config.run import RunConfig, begin
from ngrpo.machine.hardware import profile_for
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.patches import TRAINING, install
from ngrpo.trainers.openrlhf import launch
from perturbations import create
from tests.support.own_process import RESULT, result_of

HERE = Path(__file__).parent


def test_an_engine_of_two_ranks_starts_in_ray(tiny: str) -> None:
    """With RAY_ADDRESS=local, which an engine's core must not take for itself."""
    env = {
        "PYTHONPATH": os.pathsep.join([str(HERE / "ray_on_cpu"), str(HERE.parents[1])]),
        "RAY_ADDRESS": "local",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # As on CUDA: the engine's core is a process of its own.
    }
    result = result_of("tests.pipeline.test_ray_engine", tiny, env=env)
    assert result == {"tokens": 8, "ranks": 2, "at once": 8}, "--engine.max_num_seqs holds"


def main(model: str) -> None:
    """Prints what an engine of two ranks generated, as JSON."""
    run = RunConfig(specs={"perturbation": create("neighbor", rate=0.5).spec()}, max_num_seqs=8)
    # Without "cpu", whose engines have processes and no Ray workers.
    conditions = (TRAINING, "without_flash_attn", *run.conditions)
    launch._start_ray(profile_for("cpu"), Flags(["--vllm.tensor_parallel_size", "2"]), conditions, run)
    begin(run)
    install(conditions)
    from openrlhf.trainer.ray.vllm_engine import create_vllm_engines
    from vllm import SamplingParams

    (engine,) = create_vllm_engines(
        num_engines=1,
        tensor_parallel_size=2,
        pretrain=model,
        seed=1,
        full_determinism=False,
        enable_prefix_caching=False,
        enforce_eager=True,
        max_model_len=256,
        gpu_memory_utilization=0.1,
    )
    params = SamplingParams(max_tokens=8, min_tokens=8, temperature=1.0)
    output = ray.get(engine.generate.remote(list(range(100, 120)), params), timeout=1500)
    # vLLM's workers are actors of the engine's core. They are listed here only if the core joined this Ray.
    actors = ray.util.list_named_actors(all_namespaces=True)
    workers = [actor for actor in actors if "Worker" in actor["name"]]
    at_once = ray.get(engine.__ray_call__.remote(lambda actor: actor.llm.vllm_config.scheduler_config.max_num_seqs))
    result = {"tokens": len(output.outputs[0].token_ids), "ranks": len(workers), "at once": at_once}
    print(RESULT + json.dumps(result), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
