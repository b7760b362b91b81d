# SPDX-License-Identifier: Apache-2.0
"""The engines' side: ``python -m benchmarks.models.rollouts`` reads cases as lines of JSON, and answers each.

Each engine has a process of its own, forked from one that has imported vLLM and done nothing else, since that import
takes as long as a case. No trainer's model lives there: vLLM's Transformers backend changes classes that both share.
"""

import faulthandler
import itertools
import json
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.models.shrink import FIRST_PLACEHOLDER

PERTURBATIONS: dict[str, dict[str, Any]] = {
    "neighbor": {"variant": "released", "rate": 0.5},
    "gaussian": {"rate": 0.5},
    "gumbel": {"rate": 0.5},
}
PROMPTS = 5
PROMPT_TOKENS = 20
TOKENS = 48  # of a response
_COMMON_TOKENS = 300  # with which all prompts begin, where a prefix cache is to be used
_PREEMPTED_EVERY = 23  # calls of the scheduler


def sampled(folder: str, case: dict[str, Any]) -> dict[str, Any]:
    """Rollouts of an engine, unperturbed and with each perturbation.

    Returns:
        ``engine_class``; ``rollouts``: by the perturbation's name, and "none"; or ``verdict`` and ``message`` of what
        did not work.
    """
    from ngrpo.rollout import set_perturbation
    from tests.stack.harness import build_engine, sample

    settings = engine_settings(folder, case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            llm = build_engine(folder, {"name": "neighbor", **PERTURBATIONS["neighbor"]}, **settings)
            prompts = _prompts(llm, case["under"])
            counts = _disturbed(llm, case["under"])
            rollouts: dict[str, list[Any]] = {"none": []}
            # As many tokens as are perturbed, since the largest gap grows with their number.
            for repetition in range(1, len(PERTURBATIONS) + 1):
                plain = [{"seed": row + 100 * repetition, "enabled": False} for row in range(len(prompts))]
                rollouts["none"] += _clean(sample(llm, prompts, plain, max_tokens=TOKENS))
            seeds = [{"seed": row} for row in range(len(prompts))]
            for name, options in PERTURBATIONS.items():
                set_perturbation(llm, name, **options)
                rollouts[name] = _clean(sample(llm, prompts, seeds, max_tokens=TOKENS))
                if case["under"] == "prefix caching":  # the second time from the cache
                    rollouts[name] = _clean(sample(llm, prompts, seeds, max_tokens=TOKENS))
        except Exception as error:
            traceback.print_exc()
            return _failure(folder, settings, error)
    return {"engine_class": _class_of(llm), "rollouts": rollouts, **counts}


def engine_settings(folder: str, case: dict[str, Any]) -> dict[str, Any]:
    """vLLM's settings: small, and no pictures."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    settings: dict[str, Any] = {
        "dtype": case["dtype"],
        "model_impl": case["impl"],
        "enforce_eager": not case["compiled"],
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
    }
    if case["under"] == "preemption":
        settings |= {"max_num_batched_tokens": 32}
    if case["under"] == "prefix caching":
        settings |= {"enable_prefix_caching": True, "max_model_len": 512, "max_num_batched_tokens": 512}
    if any(name in config for name in ("vision_config", "audio_config")):
        settings["limit_mm_per_prompt"] = {"image": 0, "video": 0, "audio": 0}
    return settings


def _class_of(llm: Any) -> str:
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return type(worker.model_runner.get_model()).__name__


def _disturbed(llm: Any, under: str) -> dict[str, int]:
    """Has the scheduler preempt, or counts what its prefix cache gives; the counts grow as the engine runs."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    if under == "preemption":
        return _preempting(scheduler)
    if under == "prefix caching":
        return _counting_cached_tokens(scheduler.kv_cache_manager)
    return {}


def _preempting(scheduler: Any) -> dict[str, int]:
    """Preempts all running requests now and then; returns how many requests were preempted."""
    counts = {"preempted": 0}
    schedule = scheduler.schedule
    calls = itertools.count(1)

    def schedule_and_preempt(*args: Any, **kwargs: Any) -> Any:
        if next(calls) % _PREEMPTED_EVERY == 0:
            counts["preempted"] += len(scheduler.running)
            scheduler.reset_prefix_cache(reset_running_requests=True)
        return schedule(*args, **kwargs)

    scheduler.schedule = schedule_and_preempt
    return counts


def _counting_cached_tokens(cache_manager: Any) -> dict[str, int]:
    """Counts the tokens of prompts that the prefix cache gives."""
    counts = {"cached_tokens": 0}
    get_computed_blocks = cache_manager.get_computed_blocks

    def get_and_count(*args: Any, **kwargs: Any) -> Any:
        result = get_computed_blocks(*args, **kwargs)
        counts["cached_tokens"] += int(result[1])
        return result

    cache_manager.get_computed_blocks = get_and_count
    return counts


def _prompts(llm: Any, under: str) -> list[list[int]]:
    """Random ordinary tokens, all prompts of one length: so no row of a batch is padded."""
    import numpy as np

    tokenizer = llm.get_tokenizer()
    # A processor may have added tokens of its own, which the tiny model's embedding has no rows for.
    ordinary = np.setdiff1d(np.arange(min(len(tokenizer), FIRST_PLACEHOLDER)), tokenizer.all_special_ids)
    draws = np.random.default_rng(0)
    prompts = draws.choice(ordinary, (PROMPTS, PROMPT_TOKENS))
    if under == "prefix caching":
        common = draws.choice(ordinary, (1, _COMMON_TOKENS))
        prompts = np.concatenate([np.repeat(common, PROMPTS, axis=0), prompts], axis=1)
    return prompts.tolist()


def _clean(rollouts: list[Any]) -> list[Any]:
    """The rollouts without a placeholder of images in the text, which no model that was trained answers with."""
    return [rollout for rollout in rollouts if max(rollout.tokens) < FIRST_PLACEHOLDER]


def _failure(folder: str, settings: dict[str, Any], error: BaseException) -> dict[str, Any]:
    """The verdict on an error: a refusal of ours, something that stock vLLM cannot do either, or a fault of ours."""
    from perturbations.errors import UsageError
    from tests.stack.harness import build_engine

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UsageError) or str(cause).startswith("perturbation"):
            return {"verdict": "refused", "message": short(cause)}
        cause = cause.__cause__ or cause.__context__
    try:
        llm = build_engine(folder, None, **settings)
        llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], use_tqdm=False)
    except Exception as stock:
        return {"verdict": "not run by vLLM", "message": short(stock)}
    return {"verdict": "wrong", "message": short(error), "engine_class": _class_of(llm)}


def short(error: BaseException) -> str:
    """An error in a line: its first one, or of a report the lines that say what is wrong; else its place."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    value_errors = [line for line in lines if "Value error" in line]
    differences = [line for line in lines if ": off by " in line]
    text = "; ".join(value_errors or differences or lines[:1])
    if not text:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        file = "/".join(Path(frame.filename).parts[-2:])
        text = f"{frame.line} ({file}:{frame.lineno})"
    return f"{type(error).__name__}: {text}"[:300]


def main(runner: str, compiled: bool) -> None:
    """Answers the cases on standard input until it ends."""
    # Settings that are read once. Without Dynamo an eager engine does not compile its sampling, which takes longest.
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    # One thread: the models are tiny, and two that wait for each other take many times as long on a busy machine.
    os.environ |= {"OMP_NUM_THREADS": "1"}
    if not compiled:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if runner == "V2":
        from tests.stack import as_on_cuda

        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        as_on_cuda.interpret_triton()
    import_module("vllm.v1.worker.gpu_worker")
    import_module("tests.stack.harness")
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"answered": _in_own_process(request)}
        print(json.dumps(answer), file=answers, flush=True)


def _in_own_process(request: dict[str, Any]) -> bool:
    """Whether the case's process ended within its time."""
    pid = os.fork()
    if not pid:
        try:
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            faulthandler.dump_traceback_later(0.9 * request["limit"])  # where a case hangs is told in its log
            Path(request["target"]).write_bytes(pickle.dumps(sampled(request["folder"], request["case"])))
        except BaseException:
            traceback.print_exc()
        finally:
            # vLLM's engines and Triton's interpreter do not end well together with the interpreter of Python.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    end = time.monotonic() + request["limit"]
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "compiled")
