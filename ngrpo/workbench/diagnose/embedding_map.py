# SPDX-License-Identifier: Apache-2.0
"""The embedding map (N-GRPO, figure 1): tokens, perturbed many times, decoded back, in the plane of two components.

Where the perturbed copies come from: the model itself, unperturbed, writes a few sentences with each word, and the
steps at which the token was the likeliest are kept, with their logits. At such a step, with that token as the sampled
one, the perturbation is asked for an input, each time with another seed; its gate is left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ngrpo.workbench.diagnose.inputs import nearest_tokens
from ngrpo.workbench.diagnose.measuring import attached, put
from ngrpo.workbench.diagnose.probe import ADDRESS, COLLECTION
from ngrpo.workbench.diagnose.sample import GroupSampling
from ngrpo.workbench.evaluate.engine import generate
from perturbations import Perturbation, Step, registry, seeds, streams
from perturbations.edit import realise
from perturbations.errors import UsageError, require

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.tokenizers import TokenizerLike

    from ngrpo.config.arms import Arm
    from ngrpo.rollout.attach import AttachedPerturbation

WORDS = (
    *("therefore", "sum", "because", "number", "green", "water", "first", "music", "happy", "house"),
    *("three", "people", "time", "small", "city", "year", "good", "world", "book", "friend"),
)
TOKENS = 10
COPIES = 64
RELATED = 10  # a token's nearest so many are related to it
_FEW = 8  # a token with fewer contexts gets some more from the repeated word
_AROUND = 8  # neighbors of each token that span the plane with it
_ANSWERS, _LENGTH = 8, 64
_REPEATED, _MORE = 32, 4
ROOM = 160  # tokens of its longest prompt and answer
_DIGITS = 6


def choose_tokens(tokenizer: TokenizerLike, words: str | None) -> list[tuple[int, str]]:
    """The tokens of the map: (id, text).

    Args:
        tokenizer: of the model.
        words: separated by commas; None for the first ten of :data:`WORDS` that are one token with their blank.

    Raises:
        UsageError: for a word that is more than one token.
    """
    candidates = [word.strip() for word in words.split(",")] if words else list(WORDS)
    tokens = []
    for word in candidates:
        singles = [ids[0] for text in (f" {word}", word) if len(ids := _encode(tokenizer, text)) == 1]
        if singles:
            tokens.append((singles[0], tokenizer.decode([singles[0]])))
        elif words:
            raise UsageError(f"--tokens: {word!r} is not one token of this model. Give common whole words.")
    if not tokens:
        raise UsageError("--embedding-map: none of the usual words is one token here. Name some with --tokens.")
    return tokens if words else tokens[:TOKENS]


def make(llm: LLM, strategies: Sequence[Arm], tokens: list[tuple[int, str]], seed: int) -> dict[str, Any]:
    """The map of all perturbing strategies; of those that differ in their gates alone, the first.

    Args:
        llm: of :func:`ngrpo.workbench.diagnose.measuring.build`.
        strategies: the unperturbed ones are left out.
        tokens: of :func:`choose_tokens`.
        seed: of the contexts and the perturbations.

    Returns:
        ``embedding_map`` of diagnosis.json.

    Raises:
        UsageError: where the model never writes any of the tokens, or a strategy needs more than logits.
    """
    for strategy in _different(strategies):
        if registry.create(**require(strategy.spec, "the spec")).reads_hidden:
            raise UsageError(
                f"--embedding-map: {strategy.name} decides by the last hidden state, and the map's contexts have logits"
                " alone. Leave it out of the perturbations, or leave the map out."
            )
    occurrences = contexts(llm, tokens, seed)
    tokens = [token for token in tokens if occurrences[token[0]]]
    if not tokens:
        raise UsageError("--embedding-map: the model wrote none of the tokens. Name others with --tokens.")
    ids = torch.tensor([token for token, _ in tokens])
    here = attached(llm)
    matrix, tokenizer = here.embeddings.matrix(), llm.get_tokenizer()
    ids = ids.to(matrix.device)
    index = here.embeddings.index("cosine")
    around, _ = index.query(ids, _AROUND)
    related, _ = index.query(ids, RELATED)
    plane = Plane(matrix[torch.cat([ids, around.reshape(-1)]).unique()])
    perturbations = []
    for strategy in _different(strategies):
        put(llm, strategy)
        perturbations.append(_copies(attached(llm), strategy, tokens, occurrences, related, plane, tokenizer, seed))
    return {
        "metric": "cosine",
        "copies": COPIES,
        "tokens": [
            {"id": token, "text": text, **point, "contexts": len(occurrences[token])}
            for (token, text), point in zip(tokens, plane.coordinates(matrix[ids]))
        ],
        "neighbors": [
            {"token": row, "text": tokenizer.decode([neighbor]), **point}
            for row, neighbors in enumerate(around.tolist())
            for neighbor, point in zip(neighbors, plane.coordinates(matrix[around[row]]))
        ],
        "perturbations": perturbations,
        "explained_variance": plane.explained,
    }


class Plane:
    """The first two principal components of some embeddings: the tokens and their nearest neighbors."""

    def __init__(self, vectors: Tensor) -> None:
        """``vectors``: (M, D), M of at least 2."""
        wide = vectors.double().cpu()
        self._mean = wide.mean(dim=0)
        _, scales, directions = torch.linalg.svd(wide - self._mean, full_matrices=False)
        # An eigenvector's sign is arbitrary: the largest part is made positive, so that a run repeats.
        largest = directions[:2].gather(1, directions[:2].abs().argmax(dim=1, keepdim=True))
        self._axes = directions[:2] * largest.sign()
        variance = scales.square()
        self.explained: list[float] = (variance[:2] / variance.sum()).tolist()

    def coordinates(self, vectors: Tensor) -> list[dict[str, float]]:
        """(N, D) to N points with ``x`` and ``y``."""
        pairs = ((vectors.double().cpu() - self._mean) @ self._axes.T).tolist()
        return [{"x": round(x, _DIGITS), "y": round(y, _DIGITS)} for x, y in pairs]


def contexts(llm: LLM, tokens: Sequence[tuple[int, str]], seed: int) -> dict[int, list[tuple[Tensor, int]]]:
    """Real steps at which each token was the likeliest: rows of z̃ (V,), and positions."""
    from ngrpo.rollout import set_perturbation

    tokenizer = llm.get_tokenizer()
    set_perturbation(llm, ADDRESS)
    COLLECTION.start([token for token, _ in tokens], COPIES)
    try:
        sentences = {token: _sentences(tokenizer, text) for token, text in tokens}
        # Any model goes on with a word that stands there again and again; of last resort, since it is so sure of it.
        repeated = {token: [token] * _REPEATED for token, _ in tokens}
        for texts, length in ((sentences, _LENGTH), (repeated, _MORE)):
            prompts = [prompt for token, prompt in texts.items() if len(COLLECTION.rows[token]) < _FEW]
            jobs = [
                (prompt, seeds.trajectory_seed(seed, "map", i), member)
                for i, prompt in enumerate(prompts)
                for member in range(_ANSWERS)
            ]
            list(generate(llm, jobs, GroupSampling(max_tokens=length), perturbed=True, reproducible=True))
    finally:
        occurrences = COLLECTION.stop()
    return occurrences


def _sentences(tokenizer: TokenizerLike, word: str) -> list[int]:
    request = f"Write a few sentences about anything. Use the word {word.strip()} in every sentence."
    if getattr(tokenizer, "chat_template", None):
        message: list[Any] = [{"role": "user", "content": request}]
        request = str(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))
    return _encode(tokenizer, request)


def _encode(tokenizer: TokenizerLike, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _different(strategies: Sequence[Arm]) -> list[Arm]:
    gate = {field.name for field in dataclasses.fields(Perturbation)} - {"seed"}  # what all perturbations share
    by_spec: dict[str, Arm] = {}
    for strategy in strategies:
        if strategy.spec is not None:
            spec = {name: value for name, value in strategy.spec.items() if name not in gate}
            by_spec.setdefault(json.dumps(spec, sort_keys=True), strategy)
    return list(by_spec.values())


def _copies(
    here: AttachedPerturbation,
    strategy: Arm,
    tokens: Sequence[tuple[int, str]],
    occurrences: dict[int, list[tuple[Tensor, int]]],
    related: Tensor,
    plane: Plane,
    tokenizer: TokenizerLike,
    seed: int,
) -> dict[str, Any]:
    matrix = here.embeddings.matrix()
    perturbation = registry.create(**require(strategy.spec, "the spec"))
    points: list[dict[str, Any]] = []
    others = 0
    for row, (token, text) in enumerate(tokens):
        steps = list(itertools.islice(itertools.cycle(occurrences[token]), COPIES))
        drawn_from = [seeds.trajectory_seed(perturbation.seed, seed, token, copy) for copy in range(COPIES)]
        own = torch.full((COPIES,), token, dtype=torch.int64, device=matrix.device)
        step = Step(
            logits=torch.stack([logits for logits, _ in steps]).to(matrix.device),
            sampled=own,
            temperature=torch.ones(COPIES, device=matrix.device),
            seeds=torch.tensor(drawn_from, device=matrix.device),
            positions=torch.tensor([position for _, position in steps], device=matrix.device),
            embeddings=here.embeddings,
        )
        with torch.no_grad():
            proposal = perturbation.propose(step)
            keys = streams.keys(step.seeds, step.positions, streams.Stream.NOISE)
            vectors = realise(proposal.edit, here.embeddings.lookup, keys, here.module)
        others += int((proposal.tokens != own).sum())
        nearest = nearest_tokens(vectors, matrix, own).tolist()
        near = {token, *related[row].tolist()}
        for point, other in zip(plane.coordinates(vectors), nearest):
            decoded = tokenizer.decode([other])
            points.append(
                {
                    "token": row,
                    **point,
                    "nearest": decoded,
                    "related": other in near or decoded.strip().casefold() == text.strip().casefold(),
                    "changed": other != token,
                }
            )
    return {
        "strategy": strategy.id,
        "points": points,
        "unrelated_share": sum(not point["related"] for point in points) / len(points),
        "changed_share": sum(point["changed"] for point in points) / len(points),
        "other_token_drawn": others / len(points),
    }
