# SPDX-License-Identifier: Apache-2.0
"""An engine whose core is a process that was spawned, as Ray's and `vllm serve`'s are: it is patched and checked too.

Such a core loads vLLM's plugins inside ``EngineCore.__init__``. The engine belongs to a process that runs this file.
"""

import json
import os
import sys

import pytest

from tests.support.own_process import RESULT, printed_result, run_module

pytestmark = pytest.mark.more


def test_conversations_with_equal_tokens_and_other_edits(tiny: str) -> None:
    done = run_module("tests.stack.test_spawned_core", tiny)
    result = printed_result(done)
    assert result["edits"] > 10
    assert result["gap"] <= 1e-4
    assert result["other_gap"] <= 1e-4, "its prompt has the tokens of the conversation before, and other inputs"
    assert result["unedited_gap"] <= 1e-4
    assert result["confused_gap"] > 1e-2, "or the prefix cache could not confuse them visibly"
    assert result["hits"] > 0, "the part of the prompt that has no edits is shared"
    assert done.stderr.count("start-up check of the engine") == 1


def main(folder: str) -> None:
    """Prints how exactly the second turns of three conversations are replayed."""
    from dataclasses import replace

    from vllm import LLM

    from tests.stack.harness import gaps, load_in_float32, sample

    llm = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        kv_cache_memory_bytes=1 << 28,
        block_size=32,
        enable_prefix_caching=True,
        disable_log_stats=False,
        additional_config={"perturbation": {"name": "neighbor", "rate": 0.3, "variant": "released"}},
    )
    prompt = list(range(100, 164))
    (first,) = sample(llm, [prompt], max_tokens=64)
    record = first.record
    other_record = replace(record, ids=(record.ids + 1000) % 40_000)
    second_prompt = first.sequence + list(range(200, 210))

    # One after the other, so that each finds the blocks of those before it.
    (second,) = sample(llm, [second_prompt], [{"record": record.to_bytes()}], max_tokens=16)
    (other,) = sample(llm, [second_prompt], [{"record": other_record.to_bytes()}], max_tokens=16)
    (unedited,) = sample(llm, [second_prompt], max_tokens=16)
    hits = next(metric.value for metric in llm.get_metrics() if metric.name == "vllm:prefix_cache_hits")

    model = load_in_float32(folder)
    edits_of_turn = other.record.positions >= len(second_prompt)
    confused_ids = other.record.ids.copy()
    confused_ids[~edits_of_turn] = record.ids
    confused = replace(other, record=replace(other.record, ids=confused_ids))
    result = {
        "edits": len(record),
        "gap": gaps(model, [second]).max().item(),
        "other_gap": gaps(model, [other]).max().item(),
        "unedited_gap": gaps(model, [unedited]).max().item(),
        "confused_gap": gaps(model, [confused]).max().item(),
        "hits": hits,
    }
    print(RESULT + json.dumps(result), flush=True)


if __name__ == "__main__":
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    main(*sys.argv[1:])
