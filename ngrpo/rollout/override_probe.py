# SPDX-License-Identifier: Apache-2.0
"""Do overrides land where they belong? What a probe feeds, and how it is judged, of an engine and of a trainer's model.

A text whose row i is fed with the embedding of another token y must give the log-probabilities of the text with y in
that place; a row fed with its own token's embedding, and all rows before and beside, those of the untouched text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from perturbations.errors import UsageError

if TYPE_CHECKING:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

_LENGTH = 10
# Share of the effect of y itself that rounding may make up, and the effect in nats below which nothing can be told.
_ROUNDING = {False: 0.02, True: 0.25}
_LEAST_EFFECT = {False: 1e-3, True: 0.2}


@dataclass(frozen=True)
class ProbeTexts:
    """Tokens of a probe.

    Attributes:
        first: a text in front of the one with overrides.
        text: the text with overrides.
        last: a text behind it.
        row: the overridden position in ``text``, from 1 on.
        other: the token whose embedding is fed there; another one than stands there.
    """

    first: list[int]
    text: list[int]
    last: list[int]
    row: int
    other: int


@dataclass(frozen=True)
class Comparison:
    """Two sets of log-probabilities that must agree.

    Attributes:
        subject: what was compared.
        apart: mean |Δ log p| in nats.
        effect: mean |Δ log p| that y in the text makes.
        allowed: share of the effect, where it is not the one of the dtype.
    """

    subject: str
    apart: float
    effect: float
    allowed: float | None = None


def reads_tokens_elsewhere(modules: Iterable[nn.Module], embedding: VocabParallelEmbedding) -> bool:
    """Whether a model has a further table with a row for each token, as Gemma 3n and 4 have for each layer.

    Args:
        modules: of the model, without its output head.
        embedding: its input embedding, with ``num_embeddings`` rows.
    """
    rows = embedding.num_embeddings
    tables = (module for module in modules if module is not embedding and hasattr(module, "embedding_dim"))
    # Gemma's own vocabulary of a layer may lack the last tokens.
    return any(0.9 * rows <= getattr(table, "num_embeddings", 0) <= rows for table in tables)


class ProbeFailure(UsageError):
    """An override does not land where it belongs, or the model's output does not tell where it landed.

    Attributes:
        is_certain: False where it could not be told where an override landed.
    """

    def __init__(self, message: str, is_certain: bool) -> None:
        super().__init__(message)
        self.is_certain = is_certain


def text_of_probe(vocabulary: int, longest: int, attempt: int = 0) -> ProbeTexts:
    """The probe's texts: tokens of the lower half of the vocabulary, without those at its very beginning.

    Special tokens stand at either end in nearly all vocabularies; a picture's placeholder would be no text.

    Args:
        vocabulary: V.
        longest: tokens that a text may have.
        attempt: another number gives other texts.

    Raises:
        UsageError: where the model's context is too short for a probe.
    """
    length = min(_LENGTH, longest)
    if length < 4:
        raise UsageError(f"a probe needs a context of at least 7 tokens, not {longest + 3}: raise max_model_len.")
    usual = np.arange(vocabulary // 20, max(vocabulary // 2, min(vocabulary, 32)))
    tokens = np.random.default_rng(attempt).permutation(usual)
    tokens = np.resize(tokens, 3 * length + 1).tolist()
    first, text, last = (tokens[start : start + length] for start in (0, length, 2 * length))
    row, other = length // 2, tokens[-1]
    if other == text[row]:  # a vocabulary of fewer tokens than the texts have
        other = next(token for token in usual.tolist() if token != text[row])
    return ProbeTexts(first, text, last, row, other)


def judge(comparisons: Sequence[Comparison], *, half_precision: bool, where: str, model: str) -> None:
    """Compares each difference with what rounding may make of it.

    Args:
        comparisons: of one probe.
        half_precision: whether the model computes in bfloat16 or float16.
        where: whose model it is, for the message.
        model: its name, for the message.

    Raises:
        ProbeFailure: naming each comparison that is wrong; or where the effect of y is too small to tell.
    """
    least = min(comparison.effect for comparison in comparisons)
    if not least >= _LEAST_EFFECT[half_precision]:
        raise ProbeFailure(
            f"{where} cannot be proven right for {model}: another token in its text changes log-probabilities by"
            f" {least:.1g} on average, and {_LEAST_EFFECT[half_precision]:g} is needed to see where an override lands."
            " Is it a trained model, and are its weights loaded?",
            is_certain=False,
        )
    rounding = _ROUNDING[half_precision]
    wrong = [c for c in comparisons if not c.apart <= (c.allowed or rounding) * c.effect]
    if wrong:
        lines = "\n".join(
            f"  {c.subject}: off by {c.apart:.2g}, at most {(c.allowed or rounding) * c.effect:.2g} is expected"
            for c in wrong
        )
        raise ProbeFailure(
            f"{where} does not feed {model} what a perturbation asks for. Mean |Δ log p| in nats, where another token"
            f" in the text changes it by {least:.2g}:\n{lines}\nNothing that this model is fed can be trusted, so that"
            " nothing was started. Use a model of docs/models.md, or report this one with the lines above.",
            is_certain=True,
        )
