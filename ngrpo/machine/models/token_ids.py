# SPDX-License-Identifier: Apache-2.0
"""Whether a reward model or critic reads the policy's token ids as the policy's own tokens.

OpenRLHF 0.11.2 hands the ids of a response to its reward model and critic, whatever their tokenizers are.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ngrpo.machine.upstream.types import PreTrainedTokenizerBase


@dataclass(frozen=True)
class OtherToken:
    """A token of the policy that another tokenizer has under another id, or not at all.

    Attributes:
        there: the token that the other tokenizer has under its id; None where it has none.
    """

    id: int
    token: str
    there: str | None

    def __str__(self) -> str:
        there = "no token" if self.there is None else repr(self.there)
        return f"{self.id} is {self.token!r} and there {there}"


@dataclass(frozen=True)
class Comparison:
    """What another tokenizer makes of the policy's tokens.

    Attributes:
        size: how many tokens the policy's tokenizer has.
        wrong: tokens of texts, and those that every prompt or response has, that it reads as others.
        rarely_wrong: further special or added tokens that it reads as others.
    """

    size: int
    wrong: tuple[OtherToken, ...]
    rarely_wrong: tuple[OtherToken, ...]


def compare(policy: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, used: Collection[int]) -> Comparison:
    """Compares vocabularies: only ids are handed over, so that it does not matter how a text becomes tokens.

    ``used``: the ids of special or added tokens that prompts and responses have.
    """
    vocabulary = policy.get_vocab()
    there = other.get_vocab()
    token_there = {token_id: token for token, token_id in there.items()}
    added = set(policy.get_added_vocab().values())
    wrong, rarely_wrong = [], []
    for token, token_id in sorted(vocabulary.items(), key=lambda entry: entry[1]):
        if there.get(token) == token_id:
            continue
        different = OtherToken(token_id, token, token_there.get(token_id))
        if token_id in added and token_id not in used:
            rarely_wrong.append(different)
        else:
            wrong.append(different)
    return Comparison(len(vocabulary), tuple(wrong), tuple(rarely_wrong))


def rows_of(config: Mapping[str, Any]) -> int | None:
    """The rows of the input embedding by a config.json; None where it does not say."""
    rows = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return rows if isinstance(rows, int) else None


def largest_id(tokenizer: PreTrainedTokenizerBase, rows: int | None) -> int:
    """The largest id of a token, of those below ``rows``: some tokenizers have tokens that their model cannot draw."""
    return max((token for token in tokenizer.get_vocab().values() if rows is None or token < rows), default=0)
