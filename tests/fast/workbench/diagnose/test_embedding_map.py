# SPDX-License-Identifier: Apache-2.0
"""The embedding map on a small embedding made by hand: no engine, real perturbations."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ngrpo.config.arms import parse_arms
from ngrpo.workbench.diagnose import embedding_map, group_sampling
from perturbations import Step, create
from perturbations.embeddings import matrix_embeddings
from perturbations.errors import UsageError

FAMILIES = 8
MEMBERS = 12
WIDTH = 32


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
def draw_map(embedding: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """The map of three tokens; the contexts of two leave the model in doubt between their own family's members."""
    attached = SimpleNamespace(embeddings=matrix_embeddings(embedding), module=None)
    tokens = [(0, " family0.0"), (MEMBERS, " family1.0"), (2 * MEMBERS, " family2.0")]

    def context(token: int, its_logit: float) -> tuple[torch.Tensor, int]:
        """Logits of a position, 7: all members of the token's family are as likely but for the token itself."""
        logits = torch.full((FAMILIES * MEMBERS,), -10.0)
        logits[token : token + MEMBERS] = 0.0
        logits[token] = its_logit
        return logits, 7

    def contexts(llm: Any, wanted: Any, seed: int, template: Any) -> Any:
        return {
            0: [context(0, 0.1), context(0, 0.2)],
            MEMBERS: [context(MEMBERS, 0.1)],
            2 * MEMBERS: [],
        }

    monkeypatch.setattr(embedding_map, "contexts", contexts)
    monkeypatch.setattr(embedding_map, "attached", lambda llm: attached)
    monkeypatch.setattr(embedding_map, "put", lambda llm, arm: None)

    def draw(arms: str) -> dict[str, Any]:
        llm = SimpleNamespace(get_tokenizer=Tokenizer)
        return embedding_map.make(llm, parse_arms(arms), tokens, seed=0, template={})

    return draw


def test_neighbors_stay_related_and_noise_does_not(draw_map: Callable[[str], dict[str, Any]]) -> None:
    drawn = draw_map("none,neighbor:rate=0.1,neighbor:rate=0.9,gaussian:sigma=0.01,gaussian:sigma=30")
    by_arm = {perturbation["strategy"]: perturbation for perturbation in drawn["perturbations"]}
    # Arms that differ in their gates alone are one; the unperturbed one is not drawn.
    assert list(by_arm) == ["neighbor rate=0.1", "gaussian sigma=0.01", "gaussian sigma=30"]
    assert by_arm["neighbor rate=0.1"]["unrelated_share"] == 0.0
    assert by_arm["gaussian sigma=0.01"]["changed_share"] == 0.0
    # Pure noise is nearest to any of 96 tokens; 11 of them are the token and its ten nearest.
    assert by_arm["gaussian sigma=30"]["unrelated_share"] == pytest.approx(85 / 96, abs=0.1)
    assert by_arm["gaussian sigma=30"]["other_token_drawn"] == 0.0


def test_a_map_is_the_same_when_it_is_drawn_again(draw_map: Callable[[str], dict[str, Any]]) -> None:
    assert draw_map("gaussian,gumbel") == draw_map("gaussian,gumbel")


def test_tokens_without_a_context_are_left_out(draw_map: Callable[[str], dict[str, Any]]) -> None:
    drawn = draw_map("gaussian,gumbel")
    assert [token["id"] for token in drawn["tokens"]] == [0, MEMBERS]
    assert [token["contexts"] for token in drawn["tokens"]] == [2, 1]
    points = drawn["perturbations"][0]["points"]
    assert {point["token"] for point in points} == {0, 1}
    assert len(points) == 2 * embedding_map.COPIES
    assert len(drawn["neighbors"]) == 2 * 8


def test_a_mixture_draws_other_tokens(draw_map: Callable[[str], dict[str, Any]]) -> None:
    """Twelve equally likely tokens, of which five are mixed: the likeliest is drawn about once in five."""
    _, gumbel = draw_map("gaussian,gumbel")["perturbations"]
    assert 0.5 < gumbel["other_token_drawn"] < 0.95
    assert gumbel["changed_share"] > 0.5


def test_the_plane_by_hand() -> None:
    """A cross with arms 3 along the first axis and 1 along the third: variances 18 and 2 of 20."""
    cross = torch.tensor(
        [
            [3.0, 0.0, 0.0],
            [-3.0, 0.0, 0.0],
            [0.0, 0.0, 1.0],
            [0.0, 0.0, -1.0],
        ]
    )
    centre = torch.tensor([5.0, 5.0, 5.0])

    plane = embedding_map.Plane(cross + centre)

    assert plane.explained == pytest.approx([0.9, 0.1])
    # 2 along the first axis, 0.5 along the third; what is along the second is lost.
    (point,) = plane.coordinates(torch.tensor([[7.0, 1.0, 5.5]]))
    assert point["x"] == pytest.approx(2.0)
    assert point["y"] == pytest.approx(0.5)


def test_words_are_tokens_with_a_space_before_them() -> None:
    tokens = embedding_map.choose_tokens(Tokenizer(), "family2, family1")
    assert tokens == [(2 * MEMBERS, " family2.0"), (MEMBERS, " family1.0")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("therefore", "'therefore' is not one token"),
        (None, "none of the usual words"),
    ],
)
def test_words_that_are_no_token_are_refused(words: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        embedding_map.choose_tokens(Tokenizer(), words)


def test_the_probe_keeps_the_steps_at_which_a_wanted_token_is_likeliest(
    embedding: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token 5 is wanted, two steps of it; it is the likeliest of rows 0, 2 and 3, with the logits 2, 4 and 5."""
    rows = torch.arange(4)
    likeliest = torch.tensor([5, 6, 5, 5])
    logits = torch.zeros(4, len(embedding))
    logits[rows, likeliest] = 2.0 + rows
    sampled = torch.tensor([5, 9, 6, 5])
    positions = 10 + rows
    step = Step(logits, sampled, torch.ones(4), torch.zeros_like(rows), positions, matrix_embeddings(embedding))
    monkeypatch.setattr(group_sampling, "COPIES", 2)
    monkeypatch.setattr(group_sampling, "LIKELIEST", {5: []})

    proposal = create(group_sampling.PROBE).propose(step)

    assert proposal.tokens.tolist() == sampled.tolist()
    assert proposal.edit.ids.squeeze(-1).tolist() == sampled.tolist()
    assert list(group_sampling.LIKELIEST) == [5]
    first, second = group_sampling.LIKELIEST[5]
    assert float(first[0].max()) == 2.0
    assert first[1] == 10
    assert float(second[0].max()) == 4.0
    assert second[1] == 12
