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


def test_tokens_that_a_thinking_budget_forces_are_ordinary(smollm2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In V1's runner: V2's budget is a Triton kernel, which needs a GPU."""
    from vllm.config.reasoning import ReasoningConfig

    from ngrpo.rollout import set_perturbation

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    reasoning = ReasoningConfig(reasoning_start_str="<think>", reasoning_end_str="so be it</think>")
    llm = build_engine(smollm2, {"name": "gumbel"}, reasoning_config=reasoning)
    question, start, end = map(llm.get_tokenizer().encode, ("What is 7 plus 5?", "<think>", "so be it</think>"))
    for name in ("gumbel", "gaussian"):
        set_perturbation(llm, name, rate=1.0, until=None)
        for given in ({"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.9}):
            (rollout,) = sample(llm, [question + start], max_tokens=24, thinking_token_budget=6, **given)
            at = next(i for i in range(24) if rollout.tokens[i : i + len(end)] == end)
            forced = range(len(rollout.prompt) + at, len(rollout.prompt) + at + len(end))
            assert not {*forced} & {*rollout.record.positions.tolist()} and len(rollout.record) >= 8, (name, given)
