# SPDX-License-Identifier: Apache-2.0
"""Which tokens are the same word: up to case, space and English inflection."""

import re
import unicodedata
from collections.abc import Sequence

import torch
from torch import Tensor

from perturbations.neighbors.base import TableIndex

_MARKERS = "\u0120\u2581"  # Ġ and ▁: a leading space, where a vocabulary is given undecoded
_UNKNOWN = "\ufffd"  # part of a character: many tokens decode to it
_PLAIN = re.compile(r"[a-z]+('s|')?")
_VOWEL = re.compile(r"[aeiouy]")
_DOUBLED = re.compile(r"([bdfgklmnprtz])\1$")
_FURTHER = 8


def word_key(text: str) -> str:
    """The word of a token's text; two tokens with one key are the same word.

    Unicode NFKC, case folded, without spaces and space markers around it. English words also lose the endings -'s, -s,
    -ed and -ing, a final e and a doubled final consonant: ``make, making`` are ``mak``. y after a consonant becomes i:
    ``city, cities`` are ``citi``. A text of spaces is its own key.
    """
    word = unicodedata.normalize("NFKC", text).strip().strip(_MARKERS).strip().casefold().replace("\u2019", "'")
    if not word:
        return text
    if not _PLAIN.fullmatch(word):
        return word
    word = word.rstrip("'").removesuffix("'s")
    if len(word) >= 4 and word.endswith("oes"):
        word = word[:-2]
    elif len(word) >= 4 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]  # -ies and -es leave an e, which falls below
    word = _without_ed_or_ing(word)
    if len(word) >= 4 and word.endswith("e") and not word.endswith("ee"):
        word = word[:-1]
    if len(word) >= 3 and word.endswith("y") and not _VOWEL.match(word[-2]):
        word = word[:-1] + "i"
    return word[:-1] if len(word) >= 4 and _DOUBLED.search(word) else word


def _without_ed_or_ing(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if len(word) >= 5 else word  # agreed; but not need
    ending = "ed" if word.endswith("ed") else "ing"
    stem = word.removesuffix(ending)
    if len(stem) == len(word) or len(stem) < 2 or not _VOWEL.search(stem):
        return word  # bed, thing, string
    if len(stem) > 2 or (ending == "ing" and stem[-1] in "aeiou"):
        return stem  # going
    return stem + "e"  # used, using


def word_numbers(texts: Sequence[str], size: int) -> Tensor:
    """Numbers the words of a vocabulary, (V,) int64 with V = ``size``: tokens with one number are one word."""
    # A token that holds part of a character decodes to U+FFFD, as many others do, and is a word of its own; so are rows
    # beyond the texts of the tokens.
    numbers: dict[str, int] = {}
    of_texts = [i if _UNKNOWN in text else numbers.setdefault(word_key(text), i) for i, text in enumerate(texts[:size])]
    return torch.tensor([*of_texts, *range(len(of_texts), size)], dtype=torch.int64)


class OtherWords(TableIndex):
    """The nearest tokens that are another word than the queried token, with the index's own scores."""

    # Each row is filtered when it is filled, among the k + 8 nearest and, where these hold fewer than k other words,
    # among eight times as many. The nearest of the same word fill what is missing at the end of the row.

    def __init__(self, index: TableIndex, words: Tensor) -> None:
        """``words``: as of :func:`word_numbers`; the table of ``index`` is not used."""
        super().__init__(index._size, index._device, index._excluded.nonzero().flatten().tolist(), index._lazy)
        self._index, self._words = index, words.to(index._device)

    def search(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As :meth:`TableIndex.search`; same words at the end of a row are out of the order."""
        ids, scores, others = self._among(tokens, k, k + _FURTHER)
        short = (others < k).nonzero().flatten()
        if len(short):
            ids[short], scores[short], _ = self._among(tokens[short], k, _FURTHER * (k + _FURTHER))
        return ids, scores

    def _among(self, tokens: Tensor, k: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """The k best of the ``width`` nearest, and how many of all those are other words, (Q,)."""
        ids, scores = self._index.search(tokens, min(width, self.most))
        same = self._words[ids] == self._words[tokens].unsqueeze(-1)
        first = same.to(torch.uint8).sort(dim=-1, stable=True).indices[:, :k]
        return ids.gather(-1, first), scores.gather(-1, first), (~same).sum(dim=-1)
