# SPDX-License-Identifier: Apache-2.0
"""`until` ends the perturbation at its text in whatever tokens it comes, in both of vLLM's model runners."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stack.harness import CROWDED, build_engine, sample

TEXTS = [
    "two </think> one more",
    "x = (1)></think>one more",
    "so be it</think>\\boxed{4}",
    "</thin </think </think> end",
]


@pytest.mark.parametrize("runner", ["0", "1"])
def test_the_end_is_found_across_token_borders(runner: str, smollm2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    llm = build_engine(smollm2, {"name": "gumbel", "rate": 1.0}, **CROWDED)
    tokenizer = llm.get_tokenizer()
    question = tokenizer.encode("What is 7 plus 5?")
    closed = tokenizer.encode("What is 7 plus 5?<think>\n\n</think>\n\n")

    def answer(text: str, prompt: list[int]) -> Any:
        grammar = StructuredOutputsParams(choice=[text])
        return sample(llm, [prompt], ignore_eos=False, structured_outputs=grammar)[0]

    for text in TEXTS:
        rollout = answer(text, question)
        tokens = [token for token in rollout.tokens if token != tokenizer.eos_token_id]
        assert tokenizer.decode(tokens) == text
        ends = [len(tokenizer.decode(tokens[: i + 1])) for i in range(len(tokens))]
        last = next(i for i, end in enumerate(ends) if end >= text.index("</think>") + len("</think>"))
        assert (rollout.record.positions - len(question)).tolist() == list(range(last)), text
    assert len(answer(TEXTS[0], closed).record) == 0
