# SPDX-License-Identifier: Apache-2.0
"""vLLM's own data parallelism: two ranks behind one AsyncLLM, which spreads the requests over them.

The ranks are children of a process that runs this file.
"""

import asyncio
import json
import os
import sys
from typing import Any

import pytest

from tests.support.own_process import RESULT, result_of

pytestmark = pytest.mark.slow
SAMPLES = 8
TOKENS = 24


def test_two_ranks(tiny: str) -> None:
    seen = result_of("tests.stack.test_data_parallel", tiny)
    assert len(seen["fingerprints"]) == 2
    assert len(set(seen["fingerprints"])) == 1
    assert sum(seen["records of each rank"]) == SAMPLES
    assert min(seen["records of each rank"]) >= 2, "or the ranks had nothing to agree about"
    assert seen["different"] == SAMPLES, "the samples of a prompt differ"
    assert seen["seeds"] == SAMPLES
    of_first_rank, of_second_rank = seen["seeded"]
    assert of_first_rank == of_second_rank, "a seed gives the same answer on either rank"
    assert seen["edits"] > 50
    assert seen["gap"] <= 1e-4
    assert seen["without"] > 1e-2
    assert seen["after an abort"] == ["after", "left"], "an aborted request leaves no record"


async def rollouts(folder: str) -> tuple[list[Any], dict[str, Any]]:
    """Samples of one prompt that the ranks share, and what else a test reads of the engine."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from ngrpo.rollout.records import cut_to_response
    from ngrpo.rollout.requests import external_id
    from perturbations import FinishedTrajectory
    from tests.stack.harness import Rollout

    engine_args = AsyncEngineArgs(
        folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=8,
        data_parallel_size=2,
        disable_log_stats=True,
        additional_config={"perturbation": {"name": "neighbor", "rate": 0.5, "variant": "released"}},
    )
    llm = AsyncLLM.from_engine_args(engine_args)
    prompt = list(range(100, 120))
    inputs = {"prompt_token_ids": prompt}

    async def answer(name: str, seed: int | None = None, rank: int | None = None) -> Any:
        extra_args = None if seed is None else {"perturbation": {"seed": seed}}
        params = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True, extra_args=extra_args)
        async for output in llm.generate(inputs, params, request_id=name, data_parallel_rank=rank):
            last = output
        return last

    def unpacked(parts: dict[str, bytes]) -> FinishedTrajectory:
        return cut_to_response(FinishedTrajectory.unpack(parts), TOKENS)

    async def take() -> list[dict[str, FinishedTrajectory]]:
        """The trajectories of each rank, by the request id that the caller gave."""
        ranks = await llm.collective_rpc("perturbation_take", args=(None, []))
        return [{external_id(name): unpacked(parts) for name, parts in packed.items()} for packed in ranks]

    facts: dict[str, Any] = {"fingerprints": await llm.collective_rpc("perturbation_fingerprint")}
    outputs = await asyncio.gather(*(answer(str(i)) for i in range(SAMPLES)))
    of_ranks = await take()
    facts["records of each rank"] = [len(trajectories) for trajectories in of_ranks]
    merged: dict[str, FinishedTrajectory] = {}
    for trajectories in of_ranks:
        merged.update(trajectories)
    samples = []
    for output in outputs:
        trajectory = merged[output.request_id]
        sample = Rollout(
            prompt=prompt,
            tokens=list(output.outputs[0].token_ids),
            record=trajectory.record,
            log_probs=trajectory.log_probs,
            engine_log_probs=[],
        )
        samples.append(sample)

    # With a seed of its own a request has the same draws on either rank.
    seeded = await asyncio.gather(answer("s0", seed=5, rank=0), answer("s1", seed=5, rank=1))
    facts["seeded"] = [list(output.outputs[0].token_ids) for output in seeded]
    await take()

    # No rank keeps anything of an aborted request.
    stream = llm.generate(inputs, SamplingParams(max_tokens=100), request_id="aborted")
    await anext(stream)
    await stream.aclose()
    await answer("after")
    # Leaving the loop closes the stream; a request that has finished is not aborted by that.
    async for output in llm.generate(inputs, SamplingParams(max_tokens=4), request_id="left"):
        if output.finished:
            break
    facts["after an abort"] = sorted(name for trajectories in await take() for name in trajectories)
    llm.shutdown()
    return samples, facts


def main(folder: str) -> None:
    from tests.stack.harness import gaps, load_in_float32

    samples, facts = asyncio.run(rollouts(folder))
    model = load_in_float32(folder)
    answers = {tuple(sample.tokens) for sample in samples}
    seeds = {sample.record.seed for sample in samples}
    result = {
        **facts,
        "different": len(answers),
        "seeds": len(seeds),
        "edits": sum(len(sample.record) for sample in samples),
        "gap": gaps(model, samples).max().item(),
        "without": gaps(model, samples, replay=False).max().item(),
    }
    print(RESULT + json.dumps(result), flush=True)


if __name__ == "__main__":
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main(*sys.argv[1:])
