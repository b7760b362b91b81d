# SPDX-License-Identifier: Apache-2.0
"""Requests that exclude tokens, and what holds of their answers: for both of vLLM's model runners."""

import re
from typing import Any

import numpy as np

from ngrpo.rollout import set_perturbation, take_trajectories
from perturbations import registry
from tests.stack.harness import chat_prompts, sample

ALLOWED, SINGLE = list(range(300, 320)), [17]
BAD_WORDS = ["7", " 7", "12", "plus", "The", "The sum"]
DIGITS = r"[0-9]{3}-[0-9]{4}"
TOKENS = 12
EVERY = [
    *({"name": name} for name in registry.available() if name != "none"),
    {"name": "neighbor", "variant": "released", "realization": "anchor", "until": None},
    {"name": "gaussian", "base": "fuzzy"},
    {"name": "gumbel", "top_p": 1.0, "clamp": False, "entropy_min": 0.01, "gate": "top_margin", "gate.margin": 1.0},
    {"name": "dirichlet", "alpha": 0.01, "top_p": 1.0},
    {"name": "normal", "top_p": 1.0, "k": 10},
    {"name": "tests.stack.own_perturbations:RunnerUp"},
]


def name_of(spec: dict[str, Any]) -> str:
    """The name of a case."""
    return "-".join(str(value) for value in spec.values())


def answers(llm: Any, spec: dict[str, Any], each: list[dict[str, Any]]) -> list[tuple[Any, Any, np.ndarray]]:
    """The completion, the record and the log-probabilities of one request for each dictionary of parameters."""
    from vllm import SamplingParams

    set_perturbation(llm, **{"rate": 1.0, **spec})
    (prompt,) = chat_prompts(llm, ["What is 7 plus 5?"])
    common = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}
    params = [SamplingParams(**{**common, **one}) for one in each]
    outputs = llm.generate([{"prompt_token_ids": prompt}] * len(each), params, use_tqdm=False)
    taken = take_trajectories(llm)
    return [(output.outputs[0], *taken[output.request_id]) for output in outputs]


def check_mixed_batch(llm: Any, spec: dict[str, Any]) -> int:
    """Asserts that every answer of the mixed batch is legal; how many of its positions were perturbed."""
    from vllm.sampling_params import StructuredOutputsParams

    end = llm.get_tokenizer().eos_token_id
    filters = [{"top_p": 0.3}, {"top_k": 2}, {"min_p": 0.5}, {"top_p": 0.9, "temperature": 1.5}, {"top_k": 1}]
    found = answers(
        llm,
        spec,
        [
            *filters,
            {"allowed_token_ids": ALLOWED},
            {"allowed_token_ids": SINGLE},
            {"bad_words": BAD_WORDS},
            {"ignore_eos": False, "min_tokens": TOKENS, "logit_bias": {end: 100.0}},
            {"structured_outputs": StructuredOutputsParams(regex=DIGITS), "ignore_eos": False},
            {"temperature": 0},
            {"temperature": 0, "logit_bias": {17: 1.0}},
        ],
    )
    for completion, record, log_probs in found:
        scores = [step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids)]
        assert np.isfinite(scores).all() and np.isfinite(log_probs).all()
        assert np.isfinite(record.weights).all()
    few, one, without, long, grammar, *_ = (completion for completion, *_ in found[len(filters) :])
    # Greedy: each token is the likeliest after the perturbed inputs before it, whatever token the noise picked.
    for completion, record, _ in found[-2:]:
        assert [step[token].rank for step, token in zip(completion.logprobs, completion.token_ids)] == [1] * TOKENS
        assert record.agreed.all()
        assert not (spec["name"].endswith("RunnerUp") and len(record)), "the second likeliest is never the likeliest"
    assert set(few.token_ids) <= set(ALLOWED) and set(one.token_ids) == set(SINGLE)
    for bad in _tokens_of_bad_words(llm.get_tokenizer()):
        places = range(len(without.token_ids) - len(bad) + 1)
        assert not any(list(without.token_ids[i : i + len(bad)]) == bad for i in places), bad
    assert len(long.token_ids) == TOKENS and end not in long.token_ids
    assert re.fullmatch(DIGITS, grammar.text)
    return sum(len(record) for _, record, _ in found)


def check_until(llm: Any) -> None:
    """`until` ends the perturbation at its text, in whatever tokens it comes; a prompt that has it gets none."""
    from vllm.sampling_params import StructuredOutputsParams

    set_perturbation(llm, "gumbel", rate=1.0)
    tokenizer, end = llm.get_tokenizer(), "</think>"
    question = tokenizer.encode("What is 7 plus 5?")
    texts = ["two </think> one more", "x = (1)></think>one more", "so be it</think>\\boxed{4}"]
    texts += ["</thin </think </think> end"]
    for text in texts:
        grammar = StructuredOutputsParams(choice=[text])
        (rollout,) = sample(llm, [question], ignore_eos=False, structured_outputs=grammar)
        tokens = [token for token in rollout.tokens if token != tokenizer.eos_token_id]
        assert tokenizer.decode(tokens) == text
        lengths = [len(tokenizer.decode(tokens[: i + 1])) for i in range(len(tokens))]
        last = next(i for i, length in enumerate(lengths) if length >= text.index(end) + len(end))
        assert (rollout.record.positions - len(question)).tolist() == list(range(last)), text
    closed = tokenizer.encode("What is 7 plus 5?<think>\n\n</think>\n\n")
    assert len(sample(llm, [closed], max_tokens=4)[0].record) == 0


def _tokens_of_bad_words(tokenizer: Any) -> list[list[int]]:
    """Each word's tokens, with and without a space before it where these are as many, as vLLM takes them."""
    found = []
    for word in BAD_WORDS:
        bare, spaced = (tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " "))
        found += [bare, spaced] if len(bare) == len(spaced) else [bare]
    return found
