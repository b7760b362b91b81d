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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngrpo.config.arms import Arm
from ngrpo.machine.models import conversation
from ngrpo.machine.upstream.types import LLM, TokenizerLike
from ngrpo.workbench.diagnose.group_sampling import COPIES, LIKELIEST, PROBE, GroupSampling, attached, put
from ngrpo.workbench.evaluate.engine import Job, generate
from perturbations import Perturbation, Step, registry, seeds, streams
from perturbations.edit import realise
from perturbations.embeddings import nearest_tokens
from perturbations.errors import UsageError

WORDS = (
    *("therefore", "sum", "because", "number", "green", "water", "first", "music", "happy", "house"),
    *("three", "people", "time", "small", "city", "year", "good", "world", "book", "friend"),
)
TOKENS = 10
"""The number of words that a map has where none are named."""
RELATED = 10
"""This many nearest tokens of a token are related to it."""
ROOM = 160
"""The tokens of the longest prompt and response of :func:`contexts`."""
_AROUND = 8  # neighbors of each token that span the plane with it
_RESPONSES = 8  # to each prompt of `contexts`
_LENGTH = 64  # of a response of sentences
_FEW = 8  # a token with fewer contexts gets more from a second pass, whose prompt is the token again and again
_REPEATED = 32  # tokens of a prompt of the second pass
_MORE = 4  # tokens of a response of the second pass
_DIGITS = 6

Context = tuple[Tensor, int]
"""A step at which a token was the likeliest: z̃ (V,) and position."""


def choose_tokens(tokenizer: TokenizerLike, words: str | None) -> list[tuple[int, str]]:
    """The tokens (id, text) of words with commas between; None: of the first ten of :data:`WORDS` that are one token.

    Raises ``UsageError`` for a word that is more than one token.
    """
    candidates = [word.strip() for word in words.split(",")] if words else list(WORDS)
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
    llm: LLM, arms: Sequence[Arm], tokens: list[tuple[int, str]], seed: int, template: Mapping[str, Any]
) -> dict[str, Any]:
    """``embedding_map`` of diagnosis.json: all perturbing arms; of those that differ only in gates, the first.

    ``template``: arguments of the chat template.

    Raises ``UsageError`` where the model never writes any of the tokens, or an arm needs more than logits.
    """
    perturbing = _perturbing(arms)
    occurrences = contexts(llm, tokens, seed, template)
    tokens = [token for token in tokens if occurrences[token[0]]]
    if not tokens:
        raise UsageError("--embedding-map: the model wrote none of the tokens. Name others with --tokens.")
    tokenizer = llm.get_tokenizer()
    embeddings = attached(llm).embeddings
    matrix = embeddings.matrix()
    index = embeddings.index("cosine")
    ids = torch.tensor([token for token, _ in tokens], device=matrix.device)
    neighbors_of_tokens, _ = index.query(ids, _AROUND)
    nearest_ids, _ = index.query(ids, RELATED)
    related_ids = [{token, *nearest} for (token, _), nearest in zip(tokens, nearest_ids.tolist())]
    plane = Plane(matrix[torch.cat([ids, neighbors_of_tokens.reshape(-1)]).unique()])

    perturbations = []
    for arm, perturbation in perturbing:
        put(llm, arm)
        points: list[dict[str, Any]] = []
        other_tokens = 0
        for row, (token, text) in enumerate(tokens):
            copies = _copies(llm, perturbation, token, occurrences[token], seed)
            other_tokens += int((copies.drawn != token).sum())
            for point, nearest in zip(plane.coordinates(copies.vectors), copies.nearest.tolist()):
                nearest_text = tokenizer.decode([nearest])
                is_related = nearest in related_ids[row] or _is_same_word(nearest_text, text)
                is_changed = nearest != token
                points.append(
                    {"token": row, **point, "nearest": nearest_text, "related": is_related, "changed": is_changed}
                )
        perturbations.append(
            {
                "strategy": arm.id,
                "points": points,
                "unrelated_share": sum(not point["related"] for point in points) / len(points),
                "changed_share": sum(point["changed"] for point in points) / len(points),
                "other_token_drawn": other_tokens / len(points),
            }
        )

    token_rows = []
    for (token, text), point in zip(tokens, plane.coordinates(matrix[ids])):
        token_rows.append({"id": token, "text": text, **point, "contexts": len(occurrences[token])})
    neighbor_rows = []
    for row, neighbors in enumerate(neighbors_of_tokens):
        for neighbor, point in zip(neighbors.tolist(), plane.coordinates(matrix[neighbors])):
            neighbor_rows.append({"token": row, "text": tokenizer.decode([neighbor]), **point})
    return {
        "metric": "cosine",
        "copies": COPIES,
        "tokens": token_rows,
        "neighbors": neighbor_rows,
        "perturbations": perturbations,
        "explained_variance": plane.explained,
    }


def _is_same_word(one: str, other: str) -> bool:
    """Whether two texts are equal up to case and surrounding space."""
    return one.strip().casefold() == other.strip().casefold()


def _perturbing(arms: Sequence[Arm]) -> list[tuple[Arm, Perturbation]]:
    """The perturbing arms; of those that differ only in gates, which a map ignores, the first.

    Raises ``UsageError`` for one that decides by hidden states.
    """
    gate_options = {field.name for field in dataclasses.fields(Perturbation)} - {"seed"}  # those of every perturbation
    by_options: dict[str, tuple[Arm, Perturbation]] = {}
    for arm in arms:
        if arm.spec is None:
            continue
        options = {name: value for name, value in arm.spec.items() if name not in gate_options}
        key = json.dumps(options, sort_keys=True)
        if key in by_options:
            continue
        perturbation = registry.create(**arm.spec)
        if perturbation.reads_hidden:
            raise UsageError(
                f"--embedding-map: {arm.name} decides by the last hidden state, and the map's contexts have logits"
                " alone. Leave it out of the perturbations, or leave the map out."
            )
        by_options[key] = (arm, perturbation)
    return list(by_options.values())


class Plane:
    """The first two principal components of some embeddings: the tokens and their nearest neighbors."""

    def __init__(self, vectors: Tensor) -> None:
        """Of ``vectors`` (M, D), M at least 2."""
        wide = vectors.double().cpu()
        self._mean = wide.mean(dim=0)
        _, scales, directions = torch.linalg.svd(wide - self._mean, full_matrices=False)
        axes = directions[:2]
        # A singular vector's sign is arbitrary. Its largest component is made positive, so that a run repeats.
        largest = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True))
        self._axes = axes * largest.sign()
        variance = scales.square()
        self.explained: list[float] = (variance[:2] / variance.sum()).tolist()

    def coordinates(self, vectors: Tensor) -> list[dict[str, float]]:
        """(N, D) to N points with ``x`` and ``y``."""
        centred = vectors.double().cpu() - self._mean
        pairs = (centred @ self._axes.T).tolist()
        return [{"x": round(x, _DIGITS), "y": round(y, _DIGITS)} for x, y in pairs]


def contexts(
    llm: LLM, tokens: Sequence[tuple[int, str]], seed: int, template: Mapping[str, Any]
) -> dict[int, list[Context]]:
    """By token, steps of the unperturbed model at which it was the likeliest."""
    from ngrpo.rollout import set_perturbation

    tokenizer = llm.get_tokenizer()
    sentences = {}
    for token, text in tokens:
        request = f"Write a few sentences about anything. Use the word {text.strip()} in every sentence."
        if getattr(tokenizer, "chat_template", None):
            request = conversation.rendered(tokenizer, request, template)
        sentences[token] = tokenizer.encode(request, add_special_tokens=False)
    # The second pass is a last resort: any model continues a repeated word, but is very sure of it.
    repeated = {token: [token] * _REPEATED for token, _ in tokens}
    set_perturbation(llm, PROBE)
    # The probe runs in the engine, which is in this process, and fills LIKELIEST meanwhile.
    LIKELIEST.update({token: [] for token, _ in tokens})
    try:
        for prompt_of, length in ((sentences, _LENGTH), (repeated, _MORE)):
            # In the first pass all tokens; in the second those that still have few contexts.
            prompts = [prompt for token, prompt in prompt_of.items() if len(LIKELIEST[token]) < _FEW]
            jobs = []
            for number, prompt in enumerate(prompts):
                prompt_seed = seeds.trajectory_seed(seed, "map", number)
                jobs += [Job(prompt, prompt_seed, member) for member in range(_RESPONSES)]
            list(generate(llm, jobs, GroupSampling(max_tokens=length), perturbed=True, reproducible=True))
        return dict(LIKELIEST)
    finally:
        LIKELIEST.clear()


class _Copies(NamedTuple):
    """Perturbed copies of a token."""

    vectors: Tensor  # (COPIES, D)
    nearest: Tensor  # the token nearest to each, (COPIES,) int64
    drawn: Tensor  # the token that the perturbation would write with each, (COPIES,) int64


def _copies(llm: LLM, perturbation: Perturbation, token: int, steps: Sequence[Context], seed: int) -> _Copies:
    """Perturbed copies of a token, at the steps in turn and each with a seed of its own."""
    engine = attached(llm)
    matrix = engine.embeddings.matrix()
    logits, positions = zip(*itertools.islice(itertools.cycle(steps), COPIES))
    own = torch.full((COPIES,), token, dtype=torch.int64, device=matrix.device)
    seed_of_copies = [seeds.trajectory_seed(perturbation.seed, seed, token, copy) for copy in range(COPIES)]
    step = Step(
        logits=torch.stack(logits).to(matrix.device),
        sampled=own,
        temperature=torch.ones(COPIES, device=matrix.device),
        seeds=torch.tensor(seed_of_copies, device=matrix.device),
        positions=torch.tensor(positions, device=matrix.device),
        embeddings=engine.embeddings,
    )
    with torch.no_grad():
        proposal = perturbation.propose(step)
        keys = streams.keys(step.seeds, step.positions, streams.Stream.NOISE)
        vectors = realise(proposal.edit, engine.embeddings.lookup, keys, engine.module)
    return _Copies(vectors, nearest_tokens(vectors, matrix, own), proposal.tokens)
