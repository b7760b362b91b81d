# SPDX-License-Identifier: Apache-2.0
"""The embedding map (N-GRPO, figure 1): tokens, perturbed many times, decoded back, in the plane of two components.

The unperturbed model writes a few sentences with each word. The steps at which the token was the likeliest are kept,
with their logits. At such a step, with that token as the sampled one, the perturbation proposes an input, each time
with another seed; its gate is ignored.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ngrpo.config.arms import Arm
from ngrpo.machine.models import conversation
from ngrpo.machine.upstream.types import LLM, TokenizerLike
from ngrpo.workbench.diagnose.group_sampling import COPIES, LIKELIEST, PROBE, GroupSampling, attached, put
from ngrpo.workbench.evaluate.engine import generate
from perturbations import Perturbation, Step, registry, seeds, streams
from perturbations.edit import realise
from perturbations.embeddings import nearest_tokens
from perturbations.errors import UsageError

WORDS = (
    *("therefore", "sum", "because", "number", "green", "water", "first", "music", "happy", "house"),
    *("three", "people", "time", "small", "city", "year", "good", "world", "book", "friend"),
)
TOKENS = 10
RELATED = 10  # this many nearest tokens of a token are related to it
_FEW = 8  # a token with fewer contexts gets some more from the repeated word
_AROUND = 8  # neighbors of each token that span the plane with it
_RESPONSES, _LENGTH = 8, 64
_REPEATED, _MORE = 32, 4
ROOM = 160  # tokens of its longest prompt and response
_DIGITS = 6

Contexts = dict[int, list[tuple[Tensor, int]]]
"""By token, steps at which it was the likeliest: z̃ (V,) and position."""


def choose_tokens(tokenizer: TokenizerLike, words: str | None) -> list[tuple[int, str]]:
    """The tokens (id, text) of words with commas between; None: of the first ten of :data:`WORDS` that are one token.

    Raises ``UsageError`` for a word that is more than one token.
    """
    candidates = [word.strip() for word in words.split(",")] if words else WORDS
    tokens = []
    for word in candidates:
        encoded = [tokenizer.encode(text, add_special_tokens=False) for text in (f" {word}", word)]
        single = next((ids for ids in encoded if len(ids) == 1), None)
        if single:
            tokens.append((single[0], tokenizer.decode(single)))
        elif words:
            raise UsageError(f"--tokens: {word!r} is not one token of this model. Give common whole words.")
    if not tokens:
        raise UsageError("--embedding-map: none of the usual words is one token here. Name some with --tokens.")
    return tokens if words else tokens[:TOKENS]


def make(
    llm: LLM, strategies: Sequence[Arm], tokens: list[tuple[int, str]], seed: int, template: Mapping[str, Any]
) -> dict[str, Any]:
    """``embedding_map`` of diagnosis.json: all perturbing strategies; if some differ only in gates, their first.

    ``template``: arguments of the chat template.

    Raises ``UsageError`` where the model never writes any of the tokens, or a strategy needs more than logits.
    """
    gate = {field.name for field in dataclasses.fields(Perturbation)} - {"seed"}  # options of every perturbation
    perturbing: dict[str, tuple[Arm, Perturbation]] = {}
    for strategy in strategies:
        if strategy.spec is None:
            continue
        options = {name: value for name, value in strategy.spec.items() if name not in gate}
        made = perturbing.setdefault(json.dumps(options, sort_keys=True), (strategy, registry.create(**strategy.spec)))
        if made[1].reads_hidden:
            raise UsageError(
                f"--embedding-map: {strategy.name} decides by the last hidden state, and the map's contexts have logits"
                " alone. Leave it out of the perturbations, or leave the map out."
            )
    occurrences = contexts(llm, tokens, seed, template)
    tokens = [token for token in tokens if occurrences[token[0]]]
    if not tokens:
        raise UsageError("--embedding-map: the model wrote none of the tokens. Name others with --tokens.")
    here, tokenizer = attached(llm), llm.get_tokenizer()
    matrix, index = here.embeddings.matrix(), here.embeddings.index("cosine")
    ids = torch.tensor([token for token, _ in tokens], device=matrix.device)
    around, _ = index.query(ids, _AROUND)
    related, _ = index.query(ids, RELATED)
    plane = Plane(matrix[torch.cat([ids, around.reshape(-1)]).unique()])
    perturbations = []
    for strategy, perturbation in perturbing.values():
        put(llm, strategy)
        points, others = [], 0
        for row, (token, text) in enumerate(tokens):
            vectors, nearest, drawn = _copies(llm, perturbation, token, occurrences[token], seed)
            others += int((drawn != token).sum())
            near = {token, *related[row].tolist()}
            for point, other in zip(plane.coordinates(vectors), nearest.tolist()):
                decoded = tokenizer.decode([other])
                is_related = other in near or decoded.strip().casefold() == text.strip().casefold()
                found = {"nearest": decoded, "related": is_related, "changed": other != token}
                points.append({"token": row, **point, **found})
        perturbations.append(
            {
                "strategy": strategy.id,
                "points": points,
                "unrelated_share": sum(not point["related"] for point in points) / len(points),
                "changed_share": sum(point["changed"] for point in points) / len(points),
                "other_token_drawn": others / len(points),
            }
        )
    return {
        "metric": "cosine",
        "copies": COPIES,
        "tokens": [
            {"id": token, "text": text, **point, "contexts": len(occurrences[token])}
            for (token, text), point in zip(tokens, plane.coordinates(matrix[ids]))
        ],
        "neighbors": [
            {"token": row, "text": tokenizer.decode([neighbor]), **point}
            for row, neighbors in enumerate(around)
            for neighbor, point in zip(neighbors.tolist(), plane.coordinates(matrix[neighbors]))
        ],
        "perturbations": perturbations,
        "explained_variance": plane.explained,
    }


class Plane:
    """The first two principal components of some embeddings: the tokens and their nearest neighbors."""

    def __init__(self, vectors: Tensor) -> None:
        """Of ``vectors`` (M, D), M at least 2."""
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


def contexts(llm: LLM, tokens: Sequence[tuple[int, str]], seed: int, template: Mapping[str, Any]) -> Contexts:
    """Steps of the unperturbed model at which each token was the likeliest."""
    from ngrpo.rollout import set_perturbation

    tokenizer = llm.get_tokenizer()
    sentences = {}
    for token, text in tokens:
        request = f"Write a few sentences about anything. Use the word {text.strip()} in every sentence."
        if getattr(tokenizer, "chat_template", None):
            request = conversation.rendered(tokenizer, request, template)
        sentences[token] = tokenizer.encode(request, add_special_tokens=False)
    # Any model continues a word that is repeated again and again; a last resort, since the model is so sure of it.
    repeated = {token: [token] * _REPEATED for token, _ in tokens}
    set_perturbation(llm, PROBE)
    LIKELIEST.update({token: [] for token, _ in tokens})
    try:
        for texts, length in ((sentences, _LENGTH), (repeated, _MORE)):
            prompts = [prompt for token, prompt in texts.items() if len(LIKELIEST[token]) < _FEW]
            jobs = [
                (prompt, seeds.trajectory_seed(seed, "map", i), member)
                for i, prompt in enumerate(prompts)
                for member in range(_RESPONSES)
            ]
            list(generate(llm, jobs, GroupSampling(max_tokens=length), perturbed=True, reproducible=True))
        return dict(LIKELIEST)
    finally:
        LIKELIEST.clear()


def _copies(
    llm: LLM, perturbation: Perturbation, token: int, steps: Sequence[tuple[Tensor, int]], seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Perturbed copies (COPIES, D) of a token, their nearest tokens and the tokens drawn with them (COPIES,)."""
    here = attached(llm)
    matrix = here.embeddings.matrix()
    logits, positions = zip(*itertools.islice(itertools.cycle(steps), COPIES))
    own = torch.full((COPIES,), token, dtype=torch.int64, device=matrix.device)
    drawn_from = [seeds.trajectory_seed(perturbation.seed, seed, token, copy) for copy in range(COPIES)]
    step = Step(
        logits=torch.stack(logits).to(matrix.device),
        sampled=own,
        temperature=torch.ones(COPIES, device=matrix.device),
        seeds=torch.tensor(drawn_from, device=matrix.device),
        positions=torch.tensor(positions, device=matrix.device),
        embeddings=here.embeddings,
    )
    with torch.no_grad():
        proposal = perturbation.propose(step)
        keys = streams.keys(step.seeds, step.positions, streams.Stream.NOISE)
        vectors = realise(proposal.edit, here.embeddings.lookup, keys, here.module)
    return vectors, nearest_tokens(vectors, matrix, own), proposal.tokens
