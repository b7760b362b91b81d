# SPDX-License-Identifier: Apache-2.0
"""Run by test_v2.py, in a process that only it sets up: the same rollouts in either model runner, pickled.

Arguments: V1 or V2, the model's folder, where the result goes, and whose cases: those of `make test` (test), or of
`make test-more` (more). Scheduling is asynchronous, as on CUDA.
"""

import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

from tests.stack import as_on_cuda

if __name__ == "__main__":  # before torch, which loads Triton
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(sys.argv[1] == "V2"))
    if sys.argv[1] == "V2":
        as_on_cuda.interpret_triton()

from ngrpo.methods import sampling_schedules
from ngrpo.rollout import set_perturbation, take_trajectories
from tests.stack import harness
from tests.stack.routed import TEMPERATURE, decisions, shaken

QUESTIONS = [
    "What is 7 plus 5?",
    "Explain why the sky is blue.",
    "List three prime numbers and their sum.",
]
PERTURBATIONS: dict[str, dict[str, Any]] = {
    "neighbor": {"rate": 0.5, "mix_temperature": 3.0},
    "gaussian": {"rate": 1.0},
    "gumbel": {"rate": 0.5},
    "soft": {"rate": 1.0, "gate": "tests.stack.own_perturbations:Rationed"},
    "dirichlet": {"rate": 0.5},
    "normal": {"rate": 1.0},
    "orthogonal": {"rate": 1.0},
    "multiplex": {"rate": 1.0},
    "moi": {"rate": 1.0},
    "selar": {"rate": 1.0},
    "cuts": {"rate": 1.0, "burn_in": 1},
    "lepo": {"rate": 0.5},
    "latent": {"rate": 1.0},
    "hrpo": {},
    "tests.stack.own_perturbations:DenseShake": {"rate": 0.5},
}
# Sampling parameters that change which tokens are drawn, by the name of the case.
SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "min-p": {"temperature": 0.7, "min_p": 0.2},
    "greedy": {"temperature": 0.0},
}
# Sampling schedules that reach their lowest temperature within so few tokens.
SCHEDULES: dict[str, dict[str, Any]] = {
    "ead": {"d_0": 6, "c": 2},
    "edt": {"theta": 1.0},
    "ladder": {"least": 0.5, "most": 1.5},
}
TOKENS = 6
# At temperature 1 the random model is nearly sure of its next token, and all samples of a prompt feed the same.
STOPS: dict[str, dict[str, Any]] = {
    "token": {"stop_token_ids": list(range(0, 49152, 4))},
    "string": {"stop": ["e", "o"]},
    "samples": {"n": 3, "stop_token_ids": list(range(0, 49152, 6)), "temperature": 2.0},
}


def share_of(name: str) -> str:
    """Which cases one belongs to: those of `make test`, or of `make test-more`, in engines of its own."""
    return "test" if name in ("neighbor", "gaussian", "gumbel", "multiplex", "token") else "more"


def seeds(count: int) -> list[dict[str, Any]]:
    """The seeds 0, 1, … as arguments of requests."""
    return [{"seed": seed} for seed in range(count)]


def of_every_perturbation(llm: Any, share: str) -> dict[str, list[harness.Rollout]]:
    """Prefills in chunks of at most 64 tokens; the second perturbation and those after it find the prompts cached."""
    prompts = harness.chat_prompts(llm, QUESTIONS)
    rollouts = {}
    for name, options in PERTURBATIONS.items():
        if share_of(name) == share:
            set_perturbation(llm, name, **options)
            rollouts[name] = harness.sample(llm, prompts, seeds(len(prompts)), max_tokens=TOKENS)
    return rollouts


def of_sampling_parameters(llm: Any) -> dict[str, list[harness.Rollout]]:
    """Also of a batch whose first request is unperturbed, under the name "switched off"."""
    set_perturbation(llm, "neighbor", rate=0.5, mix_temperature=3.0)
    prompts = harness.chat_prompts(llm, QUESTIONS[:2])
    rollouts = {}
    for name, params in SAMPLING.items():
        rollouts[name] = harness.sample(llm, prompts, seeds(2), max_tokens=TOKENS, **params)
    first_is_off = [{"seed": 0, "enabled": False}, {"seed": 1}]
    rollouts["switched off"] = harness.sample(llm, prompts, first_is_off, max_tokens=TOKENS)
    return rollouts


def of_schedules(llm: Any) -> dict[str, list[harness.Rollout]]:
    """At another temperature than 1, and with a filter that goes by the schedule's."""
    attached = harness.worker_of(llm).perturbation
    prompts = harness.chat_prompts(llm, QUESTIONS)
    answers = len(prompts)
    arguments = [{"seed": answer, "answer": answer, "answers": answers} for answer in range(answers)]
    rollouts = {}
    for name, options in SCHEDULES.items():
        attached.schedule = sampling_schedules.create(name, **options)
        set_perturbation(llm, "neighbor", rate=0.5, mix_temperature=3.0)
        rollouts[name] = harness.sample(llm, prompts, arguments, max_tokens=TOKENS, temperature=0.8, min_p=0.01)
    attached.schedule = None
    return rollouts


def of_tarpo(llm: Any) -> dict[str, Any]:
    """Rollouts, and what the router decided at each of their positions."""
    set_perturbation(llm, "tarpo")
    shaken(harness.worker_of(llm).perturbation.module)
    prompts = harness.chat_prompts(llm, QUESTIONS)
    with decisions() as seen:
        rollouts = harness.sample(llm, prompts, max_tokens=TOKENS, temperature=TEMPERATURE)
    return {"rollouts": rollouts, "seen": seen}


def of_stops(llm: Any, share: str) -> dict[str, list[tuple[str, harness.Rollout]]]:
    """Answers that end by a token, by a string, or several of one prompt; each with how it ended."""
    from vllm import SamplingParams

    set_perturbation(llm, "gumbel", rate=1.0)
    prompts = [{"prompt_token_ids": prompt} for prompt in harness.chat_prompts(llm, QUESTIONS)]
    extra_args = {"perturbation": {"seed": 3}}
    answers: dict[str, list[tuple[str, harness.Rollout]]] = {}
    for name, stop in STOPS.items():
        if share_of(name) != share:
            continue
        params = SamplingParams(max_tokens=12, ignore_eos=True, extra_args=extra_args, **stop)
        inputs = prompts[:1] if name == "samples" else prompts
        outputs = llm.generate(inputs, params, use_tqdm=False)
        trajectories = take_trajectories(llm)
        answers[name] = []
        for output in outputs:
            for number, completion in enumerate(output.outputs):
                request_id = output.request_id
                if len(output.outputs) > 1:
                    # vLLM makes a request of its own of each sample.
                    request_id = f"{number}_{request_id}"
                record, log_probs = trajectories.pop(request_id)
                rollout = harness.Rollout(
                    prompt=list(output.prompt_token_ids),
                    tokens=list(completion.token_ids),
                    record=record,
                    log_probs=log_probs,
                    engine_log_probs=[],
                )
                answers[name].append((completion.finish_reason, rollout))
        assert not trajectories
    return answers


def of_preemption(model: str) -> dict[str, Any]:
    """Seven blocks for six requests that each need a second one after three tokens."""
    spec = {"name": "gumbel", "rate": 0.5, "gate": "tests.stack.own_perturbations:Rationed"}
    options = {**harness.CROWDED, "max_model_len": 64, "max_num_seqs": 6}
    llm = harness.build_engine(model, spec, **options)
    preempted = harness.note_preemptions(llm)
    prompts = [prompt[:30] for prompt in harness.chat_prompts(llm, QUESTIONS, copies=2)]
    rollouts = harness.sample(llm, prompts, seeds(6), max_tokens=6)
    return {"rollouts": rollouts, "preempted": len(preempted)}


def of_stock(model: str) -> list[Any]:
    """Answers of an engine without a perturbation, then of one whose perturbation has the rate 0."""
    answers = []
    for spec in (None, {"name": "neighbor", "rate": 0.0}):
        llm = harness.build_engine(model, spec, max_model_len=128)
        prompts = harness.chat_prompts(llm, QUESTIONS[:2])
        answers.append(harness.stock_answers(llm, prompts, max_tokens=4))
    return answers


def main(runner: str, model: str, target: str, share: str) -> None:
    began = time.perf_counter()
    result: dict[str, Any] = {}

    def keep(name: str, value: Any) -> None:
        result[name] = value
        Path(target).write_bytes(pickle.dumps(result))
        print(name, f"{time.perf_counter() - began:.0f} s", flush=True)

    options = {
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "enable_prefix_caching": True,
    }
    with as_on_cuda.asynchronous():
        llm = harness.build_engine(model, {"name": "neighbor", "rate": 0.1}, **options)
        keep("runner", llm.llm_engine.collective_rpc("perturbation_runner"))
        keep("asynchronous", llm.llm_engine.vllm_config.scheduler_config.async_scheduling)
        if (runner, share) == ("V2", "more"):
            set_perturbation(llm, "neighbor", rate=0.5)
            keep("warm_up", as_on_cuda.warm_up(llm))
        keep("of_every_perturbation", of_every_perturbation(llm, share))
        keep("of_stops", of_stops(llm, share))
        if share == "test":
            keep("of_preemption", of_preemption(model))
            return
        keep("of_sampling_parameters", of_sampling_parameters(llm))
        keep("of_schedules", of_schedules(llm))
        keep("of_tarpo", of_tarpo(llm))
        if runner == "V2":
            keep("of_stock", of_stock(model))


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Python does not end well once vLLM's engines and Triton's interpreter are loaded.
    sys.stdout.flush()
    os._exit(0)
