# SPDX-License-Identifier: Apache-2.0
"""An engine with a perturbation does not wait: not for the device, not for a compiler, not for a record."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.decode_step import counting
from ngrpo.rollout import set_perturbation, take_records
from perturbations import ReplayRecord
from tests.stack.harness import chat_prompts, sample
from tests.stack.scheduling import worker_of

pytestmark = pytest.mark.stack


@pytest.mark.parametrize(("rate", "params"), [(1.0, {}), (0.3, {"top_p": 0.9})])
def test_decode_steps_wait_for_nothing(engine: Any, rate: float, params: dict[str, Any]) -> None:
    set_perturbation(engine, "gumbel", rate=rate)
    with counting(worker_of(engine).perturbation.perturber) as counts:
        sample(engine, chat_prompts(engine)[:3], max_tokens=10, **params)
    assert counts.steps >= 8
    assert counts.waits == ()
    assert counts.uploads <= 2 * counts.steps + 6  # and two each time that the batch is laid out anew
    assert counts.launches < 120 * counts.steps


def test_nothing_is_compiled_after_the_start(engine: Any) -> None:
    """Many requests and one, with and without filters, sampled and greedy; vLLM's own log-probabilities left out."""
    from vllm import SamplingParams

    set_perturbation(engine, "gumbel")
    prompts = [{"prompt_token_ids": prompt} for prompt in chat_prompts(engine)]
    torch._dynamo.reset()
    try:
        worker_of(engine).compile_or_warm_up_model()  # what vLLM calls at the start
        with torch.compiler.set_stance("fail_on_recompile"):
            for some in (prompts, prompts[:1]):
                for params in ({}, {"top_p": 0.9, "top_k": 20}, {"min_p": 0.1}, {"temperature": 0.0}):
                    engine.generate(some, SamplingParams(max_tokens=3, **params), use_tqdm=False)
                    assert len(take_records(engine)) == len(some)
    finally:
        torch._dynamo.reset()


def test_a_dummy_run_does_the_work_of_a_step_and_leaves_nothing(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So vLLM measures its memory with what a step needs."""
    set_perturbation(engine, "gumbel")
    worker, prompts = worker_of(engine), chat_prompts(engine)[:2]
    arguments = [{"seed": 3, "sample": i} for i in range(2)]
    sample(engine, prompts, max_tokens=1)  # their blocks are in the prefix cache, so that both runs are laid out alike
    before = sample(engine, prompts, arguments, max_tokens=6)
    perturber, rows = worker.perturbation.perturber, []
    proposed = type(perturber._perturbation).propose

    def propose(self: Any, step: Any) -> Any:
        rows.append(len(step.logits))
        return proposed(self, step)

    monkeypatch.setattr(type(perturber._perturbation), "propose", propose)
    runner = worker.model_runner
    with torch.inference_mode():
        runner._dummy_sampler_run(torch.zeros(5, runner.model_config.get_hidden_size()))
    assert set(rows) == {5}
    for one, other in zip(before, sample(engine, prompts, arguments, max_tokens=6)):
        assert one.tokens == other.tokens and one.record == other.record
        assert np.array_equal(one.log_probs, other.log_probs)


def test_the_seed_is_no_part_of_the_key_of_compiled_graphs(smollm2: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    def key(**spec: Any) -> str:
        config = EngineArgs(smollm2, additional_config={"perturbation": spec}).create_engine_config()
        found = config.compute_hash()
        assert config.additional_config == {"perturbation": spec}
        return found

    plain = EngineArgs(smollm2).create_engine_config().compute_hash()
    assert key(name="gumbel", seed=1) == key(name="gumbel", seed=2) == key(name="gumbel")
    assert len({plain, key(name="gumbel"), key(name="gumbel", k=7), key(name="soft")}) == 4


def test_a_record_is_read_once_for_a_request_and_not_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys as original
    from vllm.v1.request import Request

    from ngrpo.rollout.prefix_cache import with_trajectory_keys

    plain = inspect.unwrap(original)
    keys_of, reads, read = with_trajectory_keys(plain), [], ReplayRecord.from_bytes
    monkeypatch.setattr(ReplayRecord, "from_bytes", lambda data: reads.append(1) or read(data))
    ids = np.zeros((2, 1), np.int32)
    record = ReplayRecord(5, 60, 100, np.array([70, 90], np.int32), ids, ids.astype(np.float32), None, np.ones(2, bool))
    params = SamplingParams(max_tokens=4, extra_args={"perturbation": {"record": record.to_bytes()}})
    request = Request("a", list(range(128)), params, None)
    keyed = [keys_of(request, start, start + 16, 0)[0] is not None for start in range(0, 144, 16)]
    assert keyed == [False] * 4 + [True] * 5  # from the block that holds position 70
    assert len(reads) == 1
