# SPDX-License-Identifier: Apache-2.0
"""The start-up check's texts and its judgement, for an engine (`startup_check.py`) and for a trainer's model.

A row fed with another token's embedding must give the log-probabilities of the text with that token there; all other
rows, and a row fed with its own token's embedding, must give those of the untouched text.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from ngrpo.machine.upstream.types import VocabParallelEmbedding
from perturbations import ReplayRecord, UsageError

_LENGTH = 10  # tokens of a text
_SHORTEST = 4  # tokens of a text where the context has no room for more
_ATTEMPTS = 3  # texts that are tried where a model's output hardly depends on one of its inputs


class CheckFailure(UsageError):
    """An override does not land where it belongs, or the model's output cannot tell."""


class Precision(NamedTuple):
    """What the log-probabilities of a model can tell, by its dtype."""

    rounding: float  # fraction of another token's effect that rounding may reach
    least_effect: float  # mean |Δ log p| in nats below which another token's effect tells nothing


_FULL_PRECISION = Precision(rounding=0.02, least_effect=1e-3)
_HALF_PRECISION = Precision(rounding=0.25, least_effect=0.2)


@dataclass(frozen=True)
class CheckTexts:
    """Three texts of one length, and what is fed in the second of them.

    Attributes:
        first: the text before it in a batch.
        text: the text in which a row is overridden.
        last: the text after it in a batch.
        row: the row that is overridden, 1 or later.
        other: another token than the text's in that row, which is fed there.
    """

    first: list[int]
    text: list[int]
    last: list[int]
    row: int
    other: int

    @property
    def own(self) -> int:
        """The text's token in the row."""
        return self.text[self.row]

    @property
    def swapped(self) -> list[int]:
        """The text with the other token in the row."""
        return [*self.text[: self.row], self.other, *self.text[self.row + 1 :]]


class TextOutput(NamedTuple):
    """What a model makes of one text.

    Attributes:
        of_text: log π of the text's tokens but the first, (T - 1,).
        next_tokens: log π of the likeliest tokens at each generated position, by token; empty from a trainer's model.
        tokens: the generated tokens.
    """

    of_text: np.ndarray
    next_tokens: Sequence[dict[int, float]] = ()
    tokens: Sequence[int] = ()

    def log_probs(self, start: int = 0, stop: int | None = None, generated: int = 0) -> list[Any]:
        """Those of the text's tokens ``start + 1`` to ``stop``, and of the first ``generated`` generated positions."""
        return [self.of_text[start:stop], *self.next_tokens[:generated]]


class Comparison(NamedTuple):
    """Two sets of log-probabilities that must agree."""

    subject: str
    apart: float  # mean |Δ log p| in nats
    effect: float  # mean |Δ log p| in nats that another token in the text makes at the same places
    allowed: float | None = None  # how far apart they may be, as a fraction of the effect; None: by the precision


def reads_tokens_elsewhere(modules: Iterable[nn.Module], embedding: VocabParallelEmbedding) -> bool:
    """Whether modules (without the output head) have a further table of tokens, as Gemma 3n and 4 for each layer."""
    vocabulary = embedding.num_embeddings
    for module in modules:
        if module is embedding or not hasattr(module, "embedding_dim"):
            continue
        # Gemma's own vocabulary of a layer may lack the last tokens.
        if 0.9 * vocabulary <= getattr(module, "num_embeddings", 0) <= vocabulary:
            return True
    return False


def texts_of_check(vocabulary: int, longest: int, attempt: int = 0) -> CheckTexts:
    """Texts of at most ``longest`` tokens from the vocabulary's lower half; UsageError for too short a context."""
    length = min(_LENGTH, longest)
    if length < _SHORTEST:
        raise UsageError(
            f"the start-up check needs texts of at least {_SHORTEST} tokens, and the model has room for {longest}:"
            " raise max_model_len."
        )
    usual_tokens = np.arange(vocabulary // 20, max(vocabulary // 2, min(vocabulary, 32)))
    shuffled = np.random.default_rng(attempt).permutation(usual_tokens)
    tokens = np.resize(shuffled, 3 * length + 1).tolist()
    first = tokens[:length]
    text = tokens[length : 2 * length]
    last = tokens[2 * length : 3 * length]
    other = tokens[-1]
    row = length // 2
    if other == text[row]:  # a vocabulary of fewer tokens than the texts have
        other = next(token for token in usual_tokens.tolist() if token != text[row])
    return CheckTexts(first=first, text=text, last=last, row=row, other=other)


def record_of(fed: Mapping[int, int], prompt_tokens: int, num_tokens: int) -> ReplayRecord:
    """A record that feeds one token with weight 1 at each position of ``fed``, which ascend."""
    count = len(fed)
    return ReplayRecord(
        seed=0,
        prompt_tokens=prompt_tokens,
        num_tokens=num_tokens,
        positions=np.array(list(fed), dtype=np.int32),
        ids=np.array([[token] for token in fed.values()], dtype=np.int32),
        weights=np.ones((count, 1), dtype=np.float32),
        sigma=None,
        agreed=np.ones(count, dtype=bool),
    )


def check_texts(
    vocabulary: int,
    longest: int,
    compare: Callable[[CheckTexts], Sequence[Comparison]],
    *,
    half_precision: bool,
    where: str,
    model: str,
) -> None:
    """Compares up to three texts, until one tells where overrides land; raises :class:`CheckFailure` otherwise.

    Args:
        vocabulary: tokens of the model.
        longest: tokens of the longest text.
        compare: asks the model about a text and those around it.
        half_precision: whether the model computes in bfloat16 or float16.
        where: whose override it is, for messages.
        model: its name, for messages.
    """
    precision = _HALF_PRECISION if half_precision else _FULL_PRECISION
    effect = 0.0
    for attempt in range(_ATTEMPTS):
        comparisons = compare(texts_of_check(vocabulary, longest, attempt))
        effect = min(comparison.effect for comparison in comparisons)
        if effect >= precision.least_effect:
            break
    else:
        raise CheckFailure(
            f"{where} cannot be checked for {model}: another token in its text changes log-probabilities by"
            f" {effect:.1g} on average, and {precision.least_effect:g} is needed to see where an override lands."
            " Is it a trained model, and are its weights loaded?"
        )
    wrong: list[str] = []
    for comparison in comparisons:
        limit = (comparison.allowed or precision.rounding) * comparison.effect
        if not comparison.apart <= limit:  # also where it is NaN
            wrong.append(f"  {comparison.subject}: off by {comparison.apart:.2g}, at most {limit:.2g} is expected")
    if wrong:
        lines = "\n".join(wrong)
        raise CheckFailure(
            f"{where} does not feed {model} what a perturbation asks for. Mean |Δ log p| in nats, where another token"
            f" in the text changes it by {effect:.2g}:\n{lines}\nNothing was started, since its inputs cannot be"
            " trusted. Use a model of docs/models.md, or report this one with the lines above."
        )


def compared(
    plain: Mapping[str, TextOutput],
    fed: Mapping[str, TextOutput],
    row: int,
    *,
    reads_tokens: bool,
    what: str,
    unit: str,
) -> list[Comparison]:
    """The comparisons that an engine, or a trainer's model, must pass: its results with overrides and without.

    Args:
        plain: without overrides, of the ``first`` text, the ``text``, the ``last`` one, and the ``swapped`` one, which
            is the text with the other token.
        fed: in one batch, of the ``first`` text, the text with the ``other`` token fed at the row, the text with its
            ``own`` token fed there, and the ``last`` text.
        row: the row that is overridden.
        reads_tokens: whether the model also reads the token in the text.
        what: what happens to a row, in the comparisons' subjects.
        unit: what a text is there, in the comparisons' subjects.
    """
    text = plain["text"]
    swapped = plain["swapped"]
    effect = distance(text.log_probs(row, generated=1), swapped.log_probs(row, generated=1))

    def comparison(subject: str, ones: Sequence[Any], others: Sequence[Any]) -> Comparison:
        return Comparison(subject, distance(ones, others), effect)

    comparisons = [
        comparison(
            f"rows before the {what} one",
            fed["other"].log_probs(0, row - 1),
            text.log_probs(0, row - 1),
        ),
        comparison(
            f"a row {what} with its own token's embedding",
            fed["own"].log_probs(row, generated=2),
            text.log_probs(row, generated=2),
        ),
        comparison(
            f"the {unit} before it",
            fed["first"].log_probs(generated=2),
            plain["first"].log_probs(generated=2),
        ),
        comparison(
            f"the {unit} after it",
            fed["last"].log_probs(generated=2),
            plain["last"].log_probs(generated=2),
        ),
    ]
    subject = f"a row {what} with another token's embedding"
    if not reads_tokens:
        comparisons.append(
            comparison(
                subject,
                fed["other"].log_probs(row, generated=1),
                swapped.log_probs(row, generated=1),
            )
        )
        return comparisons
    # The model adds what is fed and a value that it looks up by the token in the text. So the log-probabilities of the
    # row are not those of the swapped text: all that is known is that they change, here by a tenth as much at least.
    unchanged = text.log_probs(row, row + 1)
    expected_change = distance(unchanged, swapped.log_probs(row, row + 1))
    change = distance(unchanged, fed["other"].log_probs(row, row + 1))
    comparisons.append(
        Comparison(
            f"{subject}, which must change",
            apart=max(expected_change - change, 0.0),
            effect=expected_change,
            allowed=0.9,
        )
    )
    return comparisons


def distance(ones: Sequence[Any], others: Sequence[Any]) -> float:
    """Mean |Δ log p|, in nats, of log-probabilities of a text (arrays) and of likeliest next tokens (dictionaries)."""
    differences: list[float] = []
    for one, other in zip(ones, others, strict=True):
        if isinstance(one, dict):
            differences.extend(_differences(one, other))
            differences.extend(_differences(other, one))
        else:
            differences.extend(np.abs(one - other).tolist())
    return float(np.mean(differences)) if differences else 0.0


def _differences(log_probs: dict[int, float], others: dict[int, float]) -> list[float]:
    """|Δ log p| of each token of ``log_probs``, where ``others`` has the likeliest tokens."""
    # A token that is not among the likeliest ones is at most as likely as the last of them.
    least = min(others.values())
    return [abs(log_prob - others.get(token, least)) for token, log_prob in log_probs.items()]
