# SPDX-License-Identifier: Apache-2.0
"""vLLM's own data parallelism: two ranks behind one AsyncLLM, which spreads the requests over them.

They are in a process of their own, which runs this file.
"""

import asyncio
import json
import os
import sys
from typing import Any

import pytest

from tests.support.own_process import RESULT, result_of

pytestmark = pytest.mark.slow
SAMPLES, TOKENS = 8, 24


def test_two_ranks(tiny: str) -> None:
    seen = result_of("tests.stack.test_data_parallel", tiny)
    assert len(seen["fingerprints"]) == 2 and len(set(seen["fingerprints"])) == 1
    assert sum(seen["records of each rank"]) == SAMPLES
    assert min(seen["records of each rank"]) >= 2, "or the ranks had nothing to agree about"
    assert (seen["different"], seen["seeds"]) == (SAMPLES, SAMPLES), "the samples of a prompt differ"
    one, other = seen["seeded"]
    assert one == other, "a seed gives the same answer on either rank"
    assert seen["edits"] > 50
    assert seen["gap"] <= 1e-4 and seen["without"] > 1e-2
    assert seen["after an abort"] == ["after", "left"], "an aborted request leaves no record"


async def rollouts(folder: str) -> tuple[list[Any], dict[str, Any]]:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from ngrpo.rollout.records import cut_to_response
    from ngrpo.rollout.requests import external_id
    from perturbations import FinishedTrajectory
    from tests.stack.harness import Rollout

    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 8}
    options |= {"data_parallel_size": 2, "disable_log_stats": True}
    config = {"perturbation": {"name": "neighbor", "rate": 0.5, "variant": "released"}}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(folder, **options, additional_config=config))
    prompt = list(range(100, 120))

    async def answer(name: str, seed: int | None = None, rank: int | None = None) -> Any:
        arguments = None if seed is None else {"perturbation": {"seed": seed}}
        params = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True, extra_args=arguments)
        asked = {"prompt_token_ids": prompt}
        async for output in llm.generate(asked, params, request_id=name, data_parallel_rank=rank):
            last = output
        return last

    async def take() -> list[dict[str, Any]]:
        taken = await llm.collective_rpc("perturbation_take", args=(None, []))
        return [{external_id(name): answer_of(parts) for name, parts in part.items()} for part in taken]

    def answer_of(parts: dict[str, bytes]) -> tuple[Any, Any]:
        found = cut_to_response(FinishedTrajectory.unpack(parts), TOKENS)
        return found.record, found.log_probs

    facts: dict[str, Any] = {"fingerprints": await llm.collective_rpc("perturbation_fingerprint")}
    outputs = await asyncio.gather(*(answer(str(i)) for i in range(SAMPLES)))
    parts = await take()
    facts["records of each rank"] = [len(part) for part in parts]
    taken = {name: pair for part in parts for name, pair in part.items()}
    found = [Rollout(prompt, list(o.outputs[0].token_ids), *taken[o.request_id], []) for o in outputs]
    # With a seed of its own a request has the same draws on either rank.
    seeded = await asyncio.gather(*(answer(f"s{i}", seed=5, rank=i) for i in range(2)))
    facts["seeded"] = [list(o.outputs[0].token_ids) for o in seeded]
    await take()
    # Of an aborted request no rank keeps anything.
    stream = llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=100), request_id="aborted")
    await anext(stream)
    await stream.aclose()
    await answer("after")
    async for output in llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=4), request_id="left"):
        if output.finished:
            break  # which closes the stream: no abort of what has finished
    facts["after an abort"] = sorted(name for part in await take() for name in part)
    llm.shutdown()
    return found, facts


def main(folder: str) -> None:
    from tests.stack.harness import gaps, load_in_float32

    found, facts = asyncio.run(rollouts(folder))
    model = load_in_float32(folder)
    result = {
        **facts,
        "different": len({tuple(r.tokens) for r in found}),
        "seeds": len({r.record.seed for r in found}),
        "edits": sum(len(r.record) for r in found),
        "gap": gaps(model, found).max().item(),
        "without": gaps(model, found, replay=False).max().item(),
    }
    print(RESULT + json.dumps(result), flush=True)


if __name__ == "__main__":
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main(*sys.argv[1:])
