# SPDX-License-Identifier: Apache-2.0
"""V2's sampler with our adapter and without a model, in a process of its own, which runs this file.

It takes seconds, for each release of vLLM.
"""

import inspect
import os
from types import SimpleNamespace
from typing import Any

from tests.stack import as_on_cuda

VOCABULARY, ROWS = 4096, 4


def test_the_perturber_sees_every_kind_of_request() -> None:
    from tests.own_process import run_module  # which loads torch

    assert "RIGHT" in run_module("tests.stack.test_v2_sampler", timeout=200.0)


def main() -> None:
    as_on_cuda.interpret_triton()
    import torch
    import vllm.v1.worker.gpu.buffer_utils as buffers
    from vllm import SamplingParams
    from vllm.v1.worker.cpu.buffer_utils import UvaBuffer

    buffers.UvaBuffer = UvaBuffer  # as a worker for CPUs does
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    from ngrpo.rollout import runners

    device = torch.device("cpu")
    states = RequestState(ROWS, 256, 64, 0, VOCABULARY, device)
    options: dict[str, Any] = {"max_num_reqs": ROWS, "vocab_size": VOCABULARY, "device": device, "req_states": states}
    if "vllm_config" in inspect.signature(Sampler).parameters:  # from 0.31 on
        options["vllm_config"] = SimpleNamespace(reasoning_config=None, speculative_config=None)
    sampler = Sampler(**options)
    requests = {
        "warm-up": SamplingParams.for_sampler_warmup(),
        "greedy": SamplingParams(temperature=0.0),
        "top-k": SamplingParams(temperature=0.5, top_k=3, logprobs=0),
        "plain": SamplingParams(),
    }
    for name, params in requests.items():
        states.add_request(name, 2, [0, 1], 0, 16)
        slot = states.req_id_to_index[name]
        arguments = {"req_idx": slot, "prompt_len": 2, "sampling_params": params}
        sampler.add_request(**{n: arguments[n] for n in inspect.signature(sampler.add_request).parameters})
    states.apply_staged_writes()
    sampler.apply_staged_writes()

    seen: dict[str, Any] = {}

    def temperature_factor(scaled: Any, temperature: Any, greedy: Any) -> Any:
        """As a sampling schedule that lets greedy rows alone."""
        seen["asked"] = scaled.clone(), temperature
        return None if not seen.get("scheduled") else torch.where(greedy < 0, 2.0, 1.0)

    def finish(scaled: Any, temperature: Any, drawable: Any, greedy: Any) -> Any:
        seen.update(scaled=scaled, temperature=temperature, drawable=drawable, greedy=greedy)
        return scaled.argmin(dim=-1)

    perturber = SimpleNamespace(
        busy=True, finish=finish, rehearse=lambda logits: None, temperature_factor=temperature_factor
    )
    sampler.sample = runners._sample_v2(sampler, SimpleNamespace(perturber=perturber))
    batch = InputBatch.make_dummy(ROWS, 2 * ROWS, InputBuffers(ROWS, 64, device))
    with torch.inference_mode():
        logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))
        given = logits.clone()
        seen["scheduled"] = True
        sampler(logits.clone(), batch)
        hot, seen["scheduled"] = dict(seen), False
        drawn = sampler(logits, batch).sampled_token_ids.flatten()
    row = {name: batch.idx_mapping.tolist().index(slot) for name, slot in states.req_id_to_index.items()}
    assert torch.equal(drawn, seen["scaled"].argmin(dim=-1))
    assert seen["temperature"][[row[name] for name in requests]].tolist() == [torch.tensor(0.9).item(), 1.0, 0.5, 1.0]
    assert torch.equal(seen["scaled"][row["plain"]], given[row["plain"]])
    assert torch.allclose(seen["scaled"][row["top-k"]], given[row["top-k"]] / 0.5)
    left = (seen["drawable"] > -torch.inf).sum(dim=-1)
    assert left[row["top-k"]] == 3
    assert left[row["plain"]] == VOCABULARY
    assert 1 <= left[row["warm-up"]] <= 50
    assert seen["greedy"][row["greedy"]] == given[row["greedy"]].argmax() and (seen["greedy"] >= 0).sum() == 1
    # With a schedule, everything is at its temperatures, filters included; what it is shown is at those asked for.
    factor = torch.where(hot["greedy"] < 0, 2.0, 1.0)
    assert torch.equal(hot["asked"][0], seen["scaled"]) and torch.equal(hot["asked"][1], seen["temperature"])
    assert torch.equal(hot["scaled"], seen["scaled"] / factor.unsqueeze(-1))
    assert torch.equal(hot["temperature"], seen["temperature"] * factor)
    assert torch.equal(hot["drawable"][row["plain"]], hot["scaled"][row["plain"]])
    likely = hot["scaled"][row["warm-up"]].softmax(dim=-1)
    kept = hot["drawable"][row["warm-up"]] > -torch.inf
    assert (likely[kept] >= 0.1 * likely.max()).all(), "min-p is of the probabilities at the schedule's temperature"


if __name__ == "__main__":
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    main()
    print("RIGHT", flush=True)
    os._exit(0)
