# SPDX-License-Identifier: Apache-2.0
"""The automaton that ends a perturbation at a text, against a search in the text itself."""

import random
from collections.abc import Sequence

import pytest
import torch

from perturbations.gates.default import StopText

TOKENS = [
    *(b"<", b"/", b"think", b">"),
    *(b" </", b">\n", b"></", b" "),
    *(b"</think>", b"a</think>b", b"", b"t", b"hink"),
]


def complete_at(stop: StopText, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[bool]:
    """Whether the text is complete after each token of a response to a prompt."""
    state = torch.tensor([stop.after_prompt(list(prompt))])
    complete = []
    for token in ids:
        state = stop.after(state, torch.tensor([token]))
        complete.append(int(state) == stop.complete)
    return complete


def occurrences(text: bytes, pieces: Sequence[bytes]) -> list[bool]:
    """Whether the text has occurred after each piece."""
    so_far = b""
    has_occurred = []
    for piece in pieces:
        so_far += piece
        has_occurred.append(text in so_far)
    return has_occurred


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        pytest.param("</think>", TOKENS, id="think"),
        pytest.param("abab", [b"a", b"b", b"ab", b"ba", b"c", b""], id="a text that overlaps itself"),
    ],
)
def test_the_first_occurrence_is_found_at_its_last_token(text: str, tokens: list[bytes]) -> None:
    """2,000 random responses of eight tokens; two ids have no token and change nothing."""
    vocabulary = len(tokens) + 2
    stop = StopText(text, tokens, vocabulary, "cpu")
    draw = random.Random(0)
    occurred = 0
    for _ in range(2000):
        ids = draw.choices(range(vocabulary), k=8)
        pieces = [tokens[token] if token < len(tokens) else b"" for token in ids]
        expected = occurrences(text.encode(), pieces)
        upto = len(ids)
        if expected[-1]:
            occurred += 1
            upto = expected.index(True) + 1
        assert complete_at(stop, ids)[:upto] == expected[:upto]
    assert occurred > 100


@pytest.fixture
def stop() -> StopText:
    return StopText("</think>", TOKENS, len(TOKENS), "cpu")


def test_a_prompt_that_ends_with_the_text_completes_it(stop: StopText) -> None:
    assert stop.after_prompt([0, 1, 2, 3, 7, 7]) == stop.complete, "white space after it"
    assert stop.after_prompt([8, len(TOKENS)]) == stop.complete, "a picture's placeholder, beyond the vocabulary"


def test_white_space_after_the_text_may_belong_to_the_text() -> None:
    with_space = StopText("</think> ", TOKENS, len(TOKENS), "cpu")
    assert with_space.after_prompt([8, 7]) == 9


def test_a_prompt_that_goes_on_after_the_text_is_at_the_start(stop: StopText) -> None:
    assert stop.after_prompt([8, 11]) == 0, "closed long ago, and something else has begun"
    assert stop.after_prompt([]) == 0


def test_a_prompt_may_begin_the_text(stop: StopText) -> None:
    """The prompt ends with " </" and "think", the response begins with ">"."""
    assert complete_at(stop, [3], prompt=[4, 2]) == [True]
