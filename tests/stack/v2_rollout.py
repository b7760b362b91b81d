# SPDX-License-Identifier: Apache-2.0
"""Run by test_v2.py, in a process that only it sets up: the same rollouts in either model runner, pickled.

Arguments: V1 or V2, the model's folder, where the result goes, whose cases (test or more). Scheduling is asynchronous,
as on CUDA.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

RUNNER, SHARE = sys.argv[1], sys.argv[4]
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(RUNNER == "V2"))

from tests.stack import as_on_cuda  # noqa: E402

if RUNNER == "V2":
    as_on_cuda.interpret_triton()

from tests.stack.harness import CROWDED, Rollout, build_engine, chat_prompts, sample  # noqa: E402
from tests.stack.routed import TEMPERATURE, decisions, shaken  # noqa: E402
from tests.stack.scheduling import note_preemptions, worker_of  # noqa: E402
from tests.stack.v2_cases import PERTURBATIONS, QUESTIONS, SAMPLING, SCHEDULES, STOPS, TOKENS, share_of  # noqa: E402


def of_this_share(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: options for name, options in cases.items() if share_of(name) == SHARE}


def of_every_perturbation(llm: Any) -> dict[str, list[Rollout]]:
    """Prefills in chunks of at most 64 tokens; the second perturbation and those after it find the prompts cached."""
    from ngrpo.rollout import set_perturbation

    prompts = chat_prompts(llm, QUESTIONS)
    found = {}
    for name, options in of_this_share(PERTURBATIONS).items():
        set_perturbation(llm, name, **options)
        found[name] = sample(llm, prompts, [{"seed": i} for i in range(len(prompts))], max_tokens=TOKENS)
    return found


def of_sampling_parameters(llm: Any) -> dict[str, list[Rollout]]:
    """Also a batch of which a part is greedy and a part unperturbed."""
    from ngrpo.rollout import set_perturbation

    set_perturbation(llm, "neighbor", rate=0.5, mix_temperature=3.0)
    prompts = chat_prompts(llm, QUESTIONS[:2])
    seeds = [{"seed": i} for i in range(2)]
    found = {name: sample(llm, prompts, seeds, max_tokens=TOKENS, **given) for name, given in SAMPLING.items()}
    found["switched off"] = sample(llm, prompts, [{"seed": 0, "enabled": False}, {"seed": 1}], max_tokens=TOKENS)
    return found


def of_schedules(llm: Any) -> dict[str, list[Rollout]]:
    """At another temperature than 1, and with a filter that goes by the schedule's."""
    from ngrpo.methods import sampling_schedules
    from ngrpo.rollout import set_perturbation

    attached = worker_of(llm).perturbation
    prompts, found = chat_prompts(llm, QUESTIONS), {}
    for name, options in SCHEDULES.items():
        attached.schedule = sampling_schedules.create(name, **options)
        set_perturbation(llm, "neighbor", rate=0.5, mix_temperature=3.0)
        arguments = [{"seed": i, "answer": i, "answers": len(prompts)} for i in range(len(prompts))]
        found[name] = sample(llm, prompts, arguments, max_tokens=TOKENS, temperature=0.8, min_p=0.01)
    attached.schedule = None
    return found


def of_tarpo(llm: Any) -> dict[str, Any]:
    """What the router decided, too."""
    from ngrpo.rollout import set_perturbation

    set_perturbation(llm, "tarpo")
    shaken(worker_of(llm).perturbation.module)
    with decisions() as seen:
        rollouts = sample(llm, chat_prompts(llm, QUESTIONS), max_tokens=TOKENS, temperature=TEMPERATURE)
    return {"rollouts": rollouts, "seen": seen}


def of_stops(llm: Any) -> dict[str, Any]:
    """Answers that end by a token, by a string, or several of one prompt; each with its number of tokens."""
    from vllm import SamplingParams

    from ngrpo.rollout import set_perturbation, take_trajectories

    set_perturbation(llm, "gumbel", rate=1.0)
    prompts = [{"prompt_token_ids": p} for p in chat_prompts(llm, QUESTIONS)]
    found = {}
    for name, given in of_this_share(STOPS).items():
        params = SamplingParams(max_tokens=12, ignore_eos=True, extra_args={"perturbation": {"seed": 3}}, **given)
        outputs = llm.generate(prompts[: 1 if name == "samples" else 3], params, use_tqdm=False)
        taken = take_trajectories(llm)
        several = len(outputs[0].outputs) > 1
        found[name] = [
            (c.finish_reason, list(o.prompt_token_ids), list(c.token_ids), *taken.pop(f"{i}_" * several + o.request_id))
            for o in outputs
            for i, c in enumerate(o.outputs)
        ]
        assert not taken
    return found


def of_preemption(model: str) -> dict[str, Any]:
    """Seven blocks for six requests that each need a second one after three tokens."""
    small = build_engine(model, {"name": "gumbel", "rate": 0.5}, **{**CROWDED, "max_model_len": 64}, max_num_seqs=6)
    preempted = note_preemptions(small)
    prompts = [p[:30] for p in chat_prompts(small, QUESTIONS, copies=2)]
    rollouts = sample(small, prompts, [{"seed": i} for i in range(6)], max_tokens=6)
    return {"rollouts": rollouts, "preempted": len(preempted)}


def of_stock(model: str) -> list[Any]:
    """Tokens and log-probabilities of an engine that never heard of us, and of one whose perturbation is off."""
    from vllm import SamplingParams

    results = []
    for spec in (None, {"name": "neighbor", "rate": 0.0}):
        llm = build_engine(model, spec, seed=3, max_num_seqs=4, max_model_len=128)
        prompts = [{"prompt_token_ids": p} for p in chat_prompts(llm, QUESTIONS[:2])]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=4, logprobs=0), use_tqdm=False)
        results.append(
            [[(t, step[t].logprob) for t, step in zip(o.outputs[0].token_ids, o.outputs[0].logprobs)] for o in outputs]
        )
    return results


def main(model: str, target: str, _: str) -> None:
    began = time.perf_counter()
    result: dict[str, Any] = {}
    with as_on_cuda.asynchronous():
        spec = {"name": "neighbor", "rate": 0.1}
        options = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 256, "enable_prefix_caching": True}
        llm = build_engine(model, spec, **options)
        result["runner"] = llm.llm_engine.collective_rpc("perturbation_runner")
        result["asynchronous"] = llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        print("loaded", f"{time.perf_counter() - began:.0f} s", flush=True)
        if RUNNER == "V2" and SHARE == "more":
            from ngrpo.rollout import set_perturbation

            set_perturbation(llm, "neighbor", rate=0.5)
            result["warm_up"] = as_on_cuda.warm_up(llm)
            print("warmed up", f"{time.perf_counter() - began:.0f} s", flush=True)
        parts: dict[Any, Any] = {of_every_perturbation: llm, of_stops: llm}
        if SHARE == "test":
            parts |= {of_preemption: model}
        else:
            parts |= {of_sampling_parameters: llm, of_schedules: llm, of_tarpo: llm}
            parts |= {of_stock: model} if RUNNER == "V2" else {}
        for part, subject in parts.items():
            result[part.__name__] = part(subject)
            Path(target).write_bytes(pickle.dumps(result))
            print(part.__name__, f"{time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[2:])
    # vLLM's engines and Triton's interpreter do not end well together with the interpreter of Python.
    sys.stdout.flush()
    os._exit(0)
