# SPDX-License-Identifier: Apache-2.0
"""The automaton that ends a perturbation at a text, against a search in the text itself."""

import random

import pytest
import torch

from perturbations.gates.default import StopText

TOKENS = [b"<", b"/", b"think", b">", b" </", b">\n", b"></", b" ", b"</think>", b"a</think>b", b"", b"t", b"hink"]


def complete_at(stop: StopText, tokens: list[int], prompt: list[int] = []) -> list[bool]:  # noqa: B006
    state, found = torch.tensor([stop.after_prompt(prompt)]), []
    for token in tokens:
        state = stop.after(state, torch.tensor([token]))
        found.append(int(state) == stop.complete)
    return found


@pytest.mark.parametrize(("text", "tokens"), [("</think>", TOKENS), ("abab", [b"a", b"b", b"ab", b"ba", b"c", b""])])
def test_the_first_occurrence_is_found_at_its_last_token(text: str, tokens: list[bytes]) -> None:
    stop, draw, occurred = StopText(text, tokens, len(tokens) + 2, "cpu"), random.Random(0), 0
    for _ in range(2000):
        ids = draw.choices(range(len(tokens) + 2), k=8)
        pieces = [tokens[i] if i < len(tokens) else b"" for i in ids]  # ids without a token change nothing
        wanted = [text.encode() in b"".join(pieces[: i + 1]) for i in range(len(ids))]
        first = wanted.index(True) if wanted[-1] else len(ids)
        assert complete_at(stop, ids)[: first + 1] == wanted[: first + 1]
        occurred += wanted[-1]
    assert occurred > 100


def test_a_prompt_counts_where_it_ends_with_the_text_or_begins_it() -> None:
    stop = StopText("</think>", TOKENS, len(TOKENS), "cpu")
    assert stop.after_prompt([0, 1, 2, 3, 7, 7]) == stop.complete  # whitespace after it
    assert StopText("</think> ", TOKENS, len(TOKENS), "cpu").after_prompt([8, 7]) == 9, "in the text too"
    assert stop.after_prompt([8, len(TOKENS)]) == stop.complete, "a picture's placeholder, beyond the vocabulary"
    assert stop.after_prompt([8, 11]) == 0, "closed long ago, and something else has begun"
    assert stop.after_prompt([]) == 0
    assert complete_at(stop, [3], prompt=[4, 2]) == [True]  # " </", "think" | ">"
