# SPDX-License-Identifier: Apache-2.0
"""Run by test_v2_load.py, in a process that only it sets up: load on the V2 runner, with a small random model.

Arguments: the model's folder, `load` or `limits`, `asynchronous` or `synchronous`. Triton's kernels are interpreted and
a step takes most of a second, so requests are short.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

from tests.stack import as_on_cuda

as_on_cuda.interpret_triton()

from ngrpo.rollout import set_perturbation  # noqa: E402
from tests.own_process import RESULT  # noqa: E402
from tests.stack.harness import build_engine, gaps, sample  # noqa: E402
from tests.stack.request_limits import EVERY, check_mixed_batch, name_of  # noqa: E402
from tests.stack.scheduling import note_preemptions, one_token_prefills, worker_of  # noqa: E402

BLOCK, WAITING = 32, 220


def load(llm: Any, model: str) -> dict[str, Any]:
    """Requests that need a second block after three tokens, with a block for each that runs; then chunks of a token."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model).float().eval()
    set_perturbation(llm, "gumbel", rate=1.0, until=None)
    preempted = note_preemptions(llm)
    prompts = [[1000 + (i * 37 + j * j) % 40_000 for j in range(BLOCK - 2)] for i in range(WAITING)]
    rollouts = sample(llm, prompts, [{"seed": i} for i in range(WAITING)], max_tokens=4)
    found: dict[str, Any] = {"preempted": len(preempted), "edits": sum(len(r.record) for r in rollouts)}
    found["gap"] = max(gaps(reference, rollouts[i : i + 20]).max().item() for i in range(0, WAITING, 20))
    found["unreplayed"] = gaps(reference, rollouts[:20], replay=False).max().item()
    with one_token_prefills(llm) as given:
        chunked = sample(llm, [prompt[:12] for prompt in prompts[:4]], [{"seed": i} for i in range(4)], max_tokens=4)
    found |= {"largest chunk": max(given), "gap of chunks": gaps(reference, chunked).max().item()}
    found["edits of chunks"] = sum(len(r.record) for r in chunked)
    requests = worker_of(llm).perturbation.requests
    llm.llm_engine.step()  # the scheduler tells of finished requests with the next step
    found["left"] = len(requests._store.live) + len(requests._dropped) + len(requests._buffer.names())
    return found


def limits(llm: Any) -> dict[str, Any]:
    """For each perturbation how many positions were perturbed in the mixed batch, or what went wrong."""
    as_on_cuda.apply_grammars_in_pytorch()
    found: dict[str, Any] = {}
    for spec in EVERY:
        began = time.perf_counter()
        try:
            found[name_of(spec)] = check_mixed_batch(llm, spec)
        except Exception:
            found[name_of(spec)] = traceback.format_exc()
        print(name_of(spec), f"{time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return found


def main(model: str, what: str, scheduling: str) -> None:
    options = {"load": {"num_gpu_blocks_override": 17, "block_size": BLOCK, "max_model_len": 64}, "limits": {}}[what]
    with as_on_cuda.asynchronous() if scheduling == "asynchronous" else contextlib.nullcontext():
        llm = build_engine(model, {"name": "neighbor"}, **{"max_model_len": 128, **options})
    assert llm.llm_engine.collective_rpc("perturbation_runner") == ["V2"]
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == (scheduling == "asynchronous")
    print(RESULT + json.dumps(load(llm, model) if what == "load" else limits(llm)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    # vLLM's engines and Triton's interpreter do not end well together with the interpreter of Python.
    os._exit(0)
