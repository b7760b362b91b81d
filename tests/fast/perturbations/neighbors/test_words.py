# SPDX-License-Identifier: Apache-2.0
"""Which tokens are the same word, and neighbors that are another one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ngrpo.rollout.attach import _LazyTokenizer
from perturbations import create
from perturbations.embeddings import ModelEmbeddings, matrix_embeddings
from perturbations.neighbors import ExactIndex, OtherWords, word_key, word_numbers

SAME = [
    " apple|apple|Apple| APPLE|apples| apple's|Apple’s|apples'|Ġapple|▁Apples|ａｐｐｌｅ",
    "city|cities|city's",
    "make|makes|making|Make",
    "call|calls|called|calling",
    "use|uses|used|using",
    "need|needs|needed|needing",
    "go|goes|going",
    "agree|agrees|agreed|agreeing",
    "try|tries|tried|trying",
    "box|boxes|boxed",
    "stop|stopped|stopping",
    "hero|heroes",
    "die|dies|died",
    "meet|meets|meeting|meetings",
    "ÉTÉ| été",
    "Straße| STRASSE",
    " 12|12",
    " +|+",
]
DIFFERENT = [
    ("need", "nee"),
    ("bed", "b"),
    ("thing", "th"),
    ("string", "str"),
    ("his", "hi"),
    ("this", "thi"),
    ("class", "cla"),
    ("she", "shed"),
    ("quick", "quickly"),
    ("привет", "привета"),
    ("12", "13"),
    (" ", "  "),
    ("\n", "\n\n"),
    ("<|im_start|>", "<|im_end|>"),
]


@pytest.mark.parametrize("group", SAME)
def test_same_words(group: str) -> None:
    assert len({word_key(text) for text in group.split("|")}) == 1


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_different_words(first: str, second: str) -> None:
    assert word_key(first) != word_key(second)


def test_broken_characters_are_no_word() -> None:
    """Tokens that hold part of a character all decode to U+FFFD, and are as different as other tokens."""
    numbers = word_numbers(["a", "A", "\ufffd", "\ufffd", " \ufffd"], 7)
    assert numbers[0] == numbers[1]
    assert len(set(numbers.tolist())) == 6, "and rows 5 and 6, without a text, are words of their own"


# On a line, from token 0:   1  2  3  4  5     distances by L2
#                            1  2  5  3  9
TEXTS = [" apple", "apple", " Apple", " pear", "apples", " plum"]
LINE = torch.tensor(
    [
        [0.0, 0.0],
        [1.0, 0.0],
        [2.0, 0.0],
        [5.0, 0.0],
        [3.0, 0.0],
        [9.0, 0.0],
    ]
)


def test_other_words_by_hand() -> None:
    index = OtherWords(ExactIndex(LINE, "l2"), word_numbers(TEXTS, 6))
    ids, scores = index.query(torch.tensor([0, 3]), 2)
    assert ids.tolist() == [[3, 5], [4, 2]]
    assert scores.tolist() == [[-5.0, -9.0], [-2.0, -3.0]]


def test_the_nearest_of_the_same_word_fill_a_row_up() -> None:
    """There are just two other words for token 0."""
    index = OtherWords(ExactIndex(LINE, "l2"), word_numbers(TEXTS, 6))
    ids, _ = index.query(torch.tensor([0]), 4)
    assert ids.tolist() == [[3, 5, 1, 2]]


@pytest.mark.parametrize(
    ("spellings", "neighbor"),
    [
        (8, 9),
        (9, 10),
        (71, 72),
        (72, 1),
    ],
)
def test_the_search_widens_once_and_then_fills_up(spellings: int, neighbor: int) -> None:
    """Token 0 and its n spellings at 1, 2, … n, then other words. k + 8 = 9 are looked at, then 8 · 9 = 72."""
    places = torch.zeros(100, 2)
    places[:, 0] = torch.arange(100.0)
    spellings_of_word = ["word"] * (spellings + 1)
    other_words = [f"other{number}x" for number in range(99 - spellings)]
    index = OtherWords(ExactIndex(places, "l2"), word_numbers(spellings_of_word + other_words, 100))
    ids, _ = index.query(torch.tensor([0]), 1)
    assert ids.tolist() == [[neighbor]]


def test_embeddings_skip_the_same_word_where_asked() -> None:
    embeddings = matrix_embeddings(LINE, texts=TEXTS)
    ids, _ = embeddings.index("l2").query(torch.tensor([0]), 2)
    assert ids.tolist() == [[1, 2]]
    ids, _ = embeddings.index("l2", skip_same_word=True).query(torch.tensor([0]), 2)
    assert ids.tolist() == [[3, 5]]


def test_embeddings_without_texts_cannot_skip_the_same_word() -> None:
    without_texts = ModelEmbeddings(lambda ids: LINE[ids], lambda: LINE)
    with pytest.raises(ValueError, match="token_texts"):
        without_texts.index("l2", skip_same_word=True)


def test_the_same_word_is_not_skipped_by_default() -> None:
    assert create("neighbor").skip_same_word is False


@pytest.mark.more
def test_a_special_token_beyond_the_embedding_excludes_no_row(smollm2: str, tmp_path: Path) -> None:
    """Tokens may have been added to a tokenizer, and not to the model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    size = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<added>"]})
    assert max(tokenizer.all_special_ids) == size
    tokenizer.save_pretrained(tmp_path)
    config: Any = SimpleNamespace(tokenizer=str(tmp_path), tokenizer_revision=None, trust_remote_code=False)
    engine_tokenizer = _LazyTokenizer(config)
    special = engine_tokenizer.special_ids(size)
    assert special == sorted(token for token in tokenizer.all_special_ids if token < size)
    assert engine_tokenizer.special_ids(size + 3) == [*special, size, size + 1, size + 2]
    matrix = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
    embeddings = matrix_embeddings(matrix, special, engine_tokenizer.vocabulary())
    index = embeddings.index("cosine", skip_special=True, skip_same_word=True)
    ids, _ = index.query(torch.tensor([5, special[0]]), 3)
    assert not set(ids.flatten().tolist()) & set(special)
