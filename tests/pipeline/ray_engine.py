# SPDX-License-Identifier: Apache-2.0
"""Run by test_ray_engine.py: OpenRLHF's engine of two tensor-parallel ranks in a Ray of its own; its result as JSON.

As `ngrpo train` starts both on CUDA, up to the devices: Ray's GPUs are declared, and ray_on_cpu/ stands on PYTHONPATH.
"""

from __future__ import annotations

import json
import sys

import ray

from ngrpo.config.run import RunConfig
from ngrpo.machine.hardware import profile_for
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.patches import install
from ngrpo.trainers.openrlhf import launch
from perturbations import create


def main(model: str, name: str) -> None:
    spec = None if name == "none" else create(name, rate=0.5).spec()
    run = RunConfig(specs={} if spec is None else {"perturbation": spec}, max_num_seqs=8)
    conditions = ("without_flash_attn", *run.conditions)  # not "cpu", whose engines have processes and no Ray workers
    profile = profile_for("cpu")
    launch._start_ray(profile, Flags(["--vllm.tensor_parallel_size", "2"]), conditions, run)
    install(conditions)
    from openrlhf.trainer.ray.vllm_engine import create_vllm_engines
    from vllm import SamplingParams

    (engine,) = create_vllm_engines(1, 2, model, 1, False, False, True, 256, gpu_memory_utilization=0.1)
    params = SamplingParams(max_tokens=8, min_tokens=8, temperature=1.0)
    output = ray.get(engine.generate.remote(list(range(100, 120)), params), timeout=500)
    # vLLM's workers are actors of the engine's core, so that they are seen here where it joined this Ray alone.
    ranks = [actor for actor in ray.util.list_named_actors(all_namespaces=True) if "Worker" in actor["name"]]
    at_once = ray.get(engine.__ray_call__.remote(lambda actor: actor.llm.vllm_config.scheduler_config.max_num_seqs))
    result = {"tokens": len(output.outputs[0].token_ids), "ranks": len(ranks), "at once": at_once}
    print("RESULT " + json.dumps(result), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
