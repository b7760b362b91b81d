# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling, the default on CUDA: the next step is launched before the tokens of this one are known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ngrpo.rollout import set_perturbation, take_trajectories
from tests.stack.as_on_cuda import asynchronous
from tests.stack.harness import Rollout, build_engine, chat_prompts, gaps, sample

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def async_engine(model: str) -> Iterator[Any]:
    with asynchronous():
        llm = build_engine(model, {"name": "gumbel"}, max_num_batched_tokens=64, enable_prefix_caching=True)
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    yield llm


@pytest.mark.parametrize(
    ("name", "options"),
    [("neighbor", {"rate": 0.3, "mix_temperature": 3.0}), ("gaussian", {"rate": 1.0}), ("gumbel", {"rate": 1.0})],
)
def test_replay_equals_rollout(async_engine: Any, hf_model: Any, name: str, options: dict[str, Any]) -> None:
    set_perturbation(async_engine, name, **options)
    rollouts = sample(async_engine, chat_prompts(async_engine, copies=6), max_tokens=48)
    gap = gaps(hf_model, rollouts)
    assert len(gap) == 24 * 48
    assert gap.max() <= 1e-4 and gap.mean() <= 1e-5
    assert sum(len(r.record) for r in rollouts) == pytest.approx(options["rate"] * len(gap), rel=0.15)


STOPS = {"token": {"stop_token_ids": list(range(0, 49152, 11))}, "string": {"stop": ["th", "an"]}}


@pytest.mark.parametrize("name", STOPS)
def test_a_record_ends_where_the_answer_ends(async_engine: Any, hf_model: Any, name: str) -> None:
    """The step that was launched before the stop was seen has drawn a further token, and its edit."""
    from vllm import SamplingParams

    set_perturbation(async_engine, "gumbel", rate=1.0)
    prompts = [{"prompt_token_ids": p} for p in chat_prompts(async_engine, copies=2)]
    outputs = async_engine.generate(prompts, SamplingParams(max_tokens=64, **STOPS[name]), use_tqdm=False)
    assert sum(o.outputs[0].finish_reason == "stop" for o in outputs) >= 4
    taken = take_trajectories(async_engine)
    rollouts = []
    for output in outputs:
        record, log_probs = taken[output.request_id]
        prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        assert record.num_tokens == len(prompt) + len(tokens)
        assert record.positions.tolist() == list(range(len(prompt), record.num_tokens))
        assert len(log_probs) == len(tokens)
        rollouts.append(Rollout(prompt, tokens, record, log_probs, []))
    assert gaps(hf_model, rollouts).max() <= 1e-4
