# SPDX-License-Identifier: Apache-2.0
"""The embedding map on a small embedding made by hand: no engine, real perturbations."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ngrpo.config.arms import parse_arms
from ngrpo.workbench.diagnose import embedding_map, group_sampling
from perturbations import Step, create
from perturbations.embeddings import matrix_embeddings
from perturbations.errors import UsageError

FAMILIES, MEMBERS, WIDTH = 8, 12, 32


class Tokenizer:
    """Token 12·f + m is the m-th of family f: ``word3.0``; one blank word is a token, others are two."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        family = text.strip().removeprefix("family")
        return [MEMBERS * int(family)] if text.startswith(" family") and family.isdigit() else [0, 1]

    def decode(self, tokens: list[int]) -> str:
        return f" family{tokens[0] // MEMBERS}.{tokens[0] % MEMBERS}"


@pytest.fixture
def embedding() -> torch.Tensor:
    """Families of tokens in nearly the same direction, each family along an axis of its own."""
    chance = torch.Generator().manual_seed(0)
    centres = torch.eye(WIDTH)[:FAMILIES].repeat_interleave(MEMBERS, dim=0)
    return centres + 0.02 * torch.randn(FAMILIES * MEMBERS, WIDTH, generator=chance)


@pytest.fixture
def made(embedding: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The map of two tokens whose contexts leave the model in doubt between their own family's members."""
    here = SimpleNamespace(embeddings=matrix_embeddings(embedding), module=None)
    tokens = [(0, " family0.0"), (MEMBERS, " family1.0"), (2 * MEMBERS, " family2.0")]

    def contexts(llm: Any, wanted: Any, seed: int, template: Any) -> Any:
        def row(token: int, top: float) -> tuple[torch.Tensor, int]:
            logits = torch.full((FAMILIES * MEMBERS,), -10.0)
            logits[token : token + MEMBERS] = 0.0
            logits[token] = top
            return logits, 7

        return {0: [row(0, 0.1), row(0, 0.2)], MEMBERS: [row(MEMBERS, 0.1)], 2 * MEMBERS: []}

    monkeypatch.setattr(embedding_map, "contexts", contexts)
    monkeypatch.setattr(embedding_map, "attached", lambda llm: here)
    monkeypatch.setattr(embedding_map, "put", lambda llm, strategy: None)

    def run(names: str) -> dict[str, Any]:
        llm = SimpleNamespace(get_tokenizer=Tokenizer)
        return embedding_map.make(llm, parse_arms(names), tokens, seed=0, template={})

    return run


def test_neighbors_stay_related_and_noise_does_not(made: Any) -> None:
    found = made("none,neighbor:rate=0.1,neighbor:rate=0.9,gaussian:sigma=0.01,gaussian:sigma=30")
    perturbations = {perturbation["strategy"]: perturbation for perturbation in found["perturbations"]}
    # Strategies that differ in their gates alone are one; the unperturbed one is not drawn.
    assert list(perturbations) == ["neighbor rate=0.1", "gaussian sigma=0.01", "gaussian sigma=30"]
    assert perturbations["neighbor rate=0.1"]["unrelated_share"] == 0.0
    assert perturbations["gaussian sigma=0.01"]["changed_share"] == 0.0
    # Pure noise is nearest to any of 96 tokens; 11 of them are the token and its ten nearest.
    assert perturbations["gaussian sigma=30"]["unrelated_share"] == pytest.approx(85 / 96, abs=0.1)
    assert perturbations["gaussian sigma=30"]["other_token_drawn"] == 0.0


def test_tokens_without_a_context_are_left_out(made: Any) -> None:
    found = made("gaussian,gumbel")
    assert found == made("gaussian,gumbel")
    assert [token["id"] for token in found["tokens"]] == [0, MEMBERS]
    assert [token["contexts"] for token in found["tokens"]] == [2, 1]
    assert {point["token"] for point in found["perturbations"][0]["points"]} == {0, 1}
    assert len(found["perturbations"][0]["points"]) == 2 * embedding_map.COPIES
    assert len(found["neighbors"]) == 2 * 8
    gumbel = found["perturbations"][1]
    # Twelve equally likely tokens, of which five are mixed: the likeliest is drawn about once in five.
    assert 0.5 < gumbel["other_token_drawn"] < 0.95
    assert gumbel["changed_share"] > 0.5


def test_the_plane_by_hand() -> None:
    # A cross with arms 3 along the first axis and 1 along the third: variances 18 and 2 of 20.
    cross = torch.tensor([[3.0, 0, 0], [-3.0, 0, 0], [0, 0, 1.0], [0, 0, -1.0]]) + torch.tensor([5.0, 5.0, 5.0])
    plane = embedding_map.Plane(cross)
    assert plane.explained == pytest.approx([0.9, 0.1])
    (point,) = plane.coordinates(torch.tensor([[7.0, 1.0, 5.5]]))
    assert (point["x"], point["y"]) == (pytest.approx(2.0), pytest.approx(0.5))


def test_words() -> None:
    found = embedding_map.choose_tokens(Tokenizer(), "family2, family1")
    assert found == [(2 * MEMBERS, " family2.0"), (MEMBERS, " family1.0")]
    with pytest.raises(UsageError, match="'therefore' is not one token"):
        embedding_map.choose_tokens(Tokenizer(), "therefore")
    with pytest.raises(UsageError, match="none of the usual words"):
        embedding_map.choose_tokens(Tokenizer(), None)


def test_the_probe_keeps_the_steps_that_were_asked_for(
    embedding: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, rows = torch.zeros(4, len(embedding)), torch.arange(4)
    logits[rows, torch.tensor([5, 6, 5, 5])] = 2.0 + rows
    sampled = torch.tensor([5, 9, 6, 5])
    step = Step(logits, sampled, torch.ones(4), torch.zeros_like(rows), 10 + rows, matrix_embeddings(embedding))
    perturbation = create(group_sampling.PROBE)
    monkeypatch.setattr(group_sampling, "COPIES", 2)
    monkeypatch.setattr(group_sampling, "LIKELIEST", {5: []})
    proposal = perturbation.propose(step)
    assert proposal.tokens.tolist() == sampled.tolist() and proposal.edit.ids.squeeze(-1).tolist() == sampled.tolist()
    kept = group_sampling.LIKELIEST
    assert [(float(row.max()), position) for row, position in kept[5]] == [(2.0, 10), (4.0, 12)] and list(kept) == [5]
