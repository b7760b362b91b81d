# SPDX-License-Identifier: Apache-2.0
"""Which tokens are the same word: up to case, space and English inflection."""

import re
import unicodedata
from collections.abc import Sequence

import torch
from torch import Tensor

from perturbations.neighbors.base import TableIndex

_MARKERS = "\u0120\u2581"  # Ġ and ▁ stand for a leading space in tokens that are not decoded
_REPLACEMENT = "\ufffd"  # to which many tokens decode that hold a part of a character
_ENGLISH = re.compile(r"[a-z]+('s|')?")
_VOWEL = re.compile(r"[aeiouy]")
_DOUBLED_CONSONANT = re.compile(r"([bdfgklmnprtz])\1$")
_FURTHER = 8  # neighbors beyond k that are searched for other words
_WIDER = 8  # times as many are searched where these have fewer than k other words


def word_key(text: str) -> str:
    """The word of a token's text; two tokens with one key are the same word.

    Unicode NFKC, case folded, without spaces and space markers around it. English words also lose the endings -'s, -s,
    -ed and -ing, a final e and a doubled final consonant: ``make, making`` are ``mak``. y after a consonant becomes i:
    ``city, cities`` are ``citi``. A text of spaces is its own key.
    """
    word = unicodedata.normalize("NFKC", text)
    word = word.strip().strip(_MARKERS).strip()
    word = word.casefold().replace("\u2019", "'")
    if not word:
        return text
    if not _ENGLISH.fullmatch(word):
        return word
    word = word.rstrip("'").removesuffix("'s")
    if len(word) >= 4 and word.endswith("oes"):
        word = word[:-2]
    elif len(word) >= 4 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]  # the e of -ies and -es is removed below
    word = _without_ed_or_ing(word)
    if len(word) >= 4 and word.endswith("e") and not word.endswith("ee"):
        word = word[:-1]
    if len(word) >= 3 and word.endswith("y") and not _VOWEL.match(word[-2]):
        word = word[:-1] + "i"
    if len(word) >= 4 and _DOUBLED_CONSONANT.search(word):
        word = word[:-1]
    return word


def _without_ed_or_ing(word: str) -> str:
    """The word without the ending -ed or -ing, where what is left can be a word."""
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
    # A word's number is the id of its first token. A token without a text is a word of its own. So is one that holds a
    # part of a character, since many different ones decode to U+FFFD.
    numbers = list(range(size))
    number_of_word: dict[str, int] = {}
    for token, text in enumerate(texts[:size]):
        if _REPLACEMENT not in text:
            numbers[token] = number_of_word.setdefault(word_key(text), token)
    return torch.tensor(numbers, dtype=torch.int64)


class OtherWords(TableIndex):
    """The nearest tokens that are another word than the queried token, with the index's own scores."""

    # A row takes the other words among the k + 8 nearest tokens. Where these are fewer than k, it takes those among
    # eight times as many tokens. Places that are still empty get the nearest tokens of the same word.

    def __init__(self, index: TableIndex, words: Tensor) -> None:
        """``words``: as :func:`word_numbers` returns them. The table of ``index`` is not used, only its search."""
        excluded = index._excluded.nonzero().flatten().tolist()
        super().__init__(index._size, index._device, excluded, index._lazy)
        self._index = index
        self._words = words.to(index._device)

    def search(self, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As :meth:`TableIndex.search`; tokens of the same word come last, out of the order of scores."""
        ids, scores, other_words = self._best_among(tokens, k, k + _FURTHER)
        short_rows = (other_words < k).nonzero().flatten()
        if len(short_rows):
            wider = _WIDER * (k + _FURTHER)
            ids[short_rows], scores[short_rows], _ = self._best_among(tokens[short_rows], k, wider)
        return ids, scores

    def _best_among(self, tokens: Tensor, k: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """The k best of the ``width`` nearest tokens: other words first, then tokens of the same word.

        Returns ids and scores, (Q, k) each, and how many of the ``width`` tokens are other words, (Q,).
        """
        ids, scores = self._index.search(tokens, min(width, self.most))  # (Q, width) each
        is_same_word = self._words[ids] == self._words[tokens].unsqueeze(-1)
        other_words_first = is_same_word.to(torch.uint8).sort(dim=-1, stable=True).indices
        best = other_words_first[:, :k]
        return ids.gather(-1, best), scores.gather(-1, best), (~is_same_word).sum(dim=-1)
