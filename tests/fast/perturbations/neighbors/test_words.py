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
    "need|nee",
    "bed|b",
    "thing|th",
    "string|str",
    "his|hi",
    "this|thi",
    "class|cla",
    "she|shed",
    "quick|quickly",
    "привет|привета",
    "12|13",
    " |  ",
    "\n|\n\n",
    "<|im_start|>|<|im_end|>",
]


@pytest.mark.parametrize("group", SAME)
def test_same_words(group: str) -> None:
    assert len({word_key(text) for text in group.split("|")}) == 1


@pytest.mark.parametrize("pair", DIFFERENT)
def test_different_words(pair: str) -> None:
    one, two = pair.split("|>|<|") if "im_" in pair else pair.split("|")
    assert word_key(one) != word_key(two)


def test_broken_characters_are_no_word() -> None:
    """Tokens that hold part of a character all decode to U+FFFD, and are as different as other tokens."""
    numbers = word_numbers(["a", "A", "\ufffd", "\ufffd", " \ufffd"], 7)
    assert numbers[0] == numbers[1]
    assert len(set(numbers.tolist())) == 6, "and rows 5 and 6, without a text, are words of their own"


# On a line, from token 0:   1  2  3  4  5     distances by L2
#                            1  2  5  3  9
TEXTS = [" apple", "apple", " Apple", " pear", "apples", " plum"]
LINE = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [5.0, 0.0], [3.0, 0.0], [9.0, 0.0]])


def test_other_words_by_hand() -> None:
    index = OtherWords(ExactIndex(LINE, "l2"), word_numbers(TEXTS, 6))
    ids, scores = index.query(torch.tensor([0, 3]), 2)
    assert ids.tolist() == [[3, 5], [4, 2]] and scores.tolist() == [[-5.0, -9.0], [-2.0, -3.0]]
    # Just two other words for token 0: the nearest of the same word fill the row up.
    assert index.query(torch.tensor([0]), 4)[0].tolist() == [[3, 5, 1, 2]]


def test_the_search_widens_once_and_then_fills_up() -> None:
    """Token 0 and its n spellings at 1, 2, … n, then other words. k + 8 = 9 are looked at, then 8 · 9 = 72."""
    for spellings, want in [(8, 9), (9, 10), (71, 72), (72, 1)]:
        places = torch.arange(100.0).unsqueeze(-1) * torch.tensor([[1.0, 0.0]])
        texts = ["word"] * (spellings + 1) + [f"other{i}x" for i in range(99 - spellings)]
        index = OtherWords(ExactIndex(places, "l2"), word_numbers(texts, 100))
        assert index.query(torch.tensor([0]), 1)[0].tolist() == [[want]], spellings


def test_through_the_geometry_and_the_perturbation() -> None:
    embeddings = matrix_embeddings(LINE, texts=TEXTS)
    assert embeddings.index("l2").query(torch.tensor([0]), 2)[0].tolist() == [[1, 2]]
    assert embeddings.index("l2", skip_same_word=True).query(torch.tensor([0]), 2)[0].tolist() == [[3, 5]]
    untold = ModelEmbeddings(lambda ids: LINE[ids], lambda: LINE)
    with pytest.raises(ValueError, match="token_texts"):
        untold.index("l2", skip_same_word=True)
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
