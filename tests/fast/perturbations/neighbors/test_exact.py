# SPDX-License-Identifier: Apache-2.0
"""The exact index against hand-derived order, brute force in float64, and awkward embeddings."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from perturbations.neighbors import ExactIndex


class Neighbors(NamedTuple):
    ids: list[int]
    scores: list[float]


# From token 0 = (1, 0):   cosine  dot   L2      L1
#   1 = (4, 3)              0.8     4    √18      6
#   2 = (6, 8)              0.6     6    √89     13
#   3 = (0, 1)              0       0    √2       2
#   4 = (-1, 0)            -1      -1     2       2   (ties with 3 in L1: the lower id first)
SMALL = torch.tensor(
    [
        [1.0, 0.0],
        [4.0, 3.0],
        [6.0, 8.0],
        [0.0, 1.0],
        [-1.0, 0.0],
    ]
)
BY_HAND = {
    "cosine": Neighbors(
        ids=[1, 2, 3, 4],
        scores=[0.8, 0.6, 0.0, -1.0],
    ),
    "dot": Neighbors(
        ids=[2, 1, 3, 4],
        scores=[6.0, 4.0, 0.0, -1.0],
    ),
    "l2": Neighbors(
        ids=[3, 4, 1, 2],
        scores=[-(2**0.5), -2.0, -(18**0.5), -(89**0.5)],
    ),
    "l1": Neighbors(
        ids=[3, 4, 1, 2],
        scores=[-2.0, -2.0, -6.0, -13.0],
    ),
}
METRICS = list(BY_HAND)


def all_neighbors(embedding: Tensor, token: int, metric: str, exclude: tuple[int, ...] = ()) -> list[int]:
    """All neighbors of a token, by float64 scores rounded to float32 and then by id."""
    rows = embedding.double()
    own = rows[token]
    if metric == "cosine":
        norms = rows.norm(dim=-1) * own.norm()
        scores = torch.where(norms > 0, (rows * own).sum(-1) / norms, -1.0)
    elif metric == "dot":
        scores = (rows * own).sum(-1)
    elif metric == "l2":
        scores = -torch.linalg.vector_norm(rows - own, ord=2, dim=-1)
    else:
        scores = -torch.linalg.vector_norm(rows - own, ord=1, dim=-1)
    rounded = scores.float().tolist()
    candidates = set(range(len(rounded))) - {token, *exclude}
    return sorted(candidates, key=lambda candidate: (-rounded[candidate], candidate))


def nearest(embedding: Tensor, token: int, metric: str) -> int:
    return all_neighbors(embedding, token, metric)[0]


def neighbors_of(index: ExactIndex, token: int, k: int) -> list[int]:
    """The k nearest neighbors of one token."""
    ids, _ = index.query(torch.tensor([token]), k)
    return ids[0].tolist()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_order_and_scores_by_hand(metric: str, dtype: torch.dtype) -> None:
    ids, scores = ExactIndex(SMALL.to(dtype), metric).query(torch.tensor([0]), 4)
    assert ids.dtype == torch.int64
    assert scores.dtype == torch.float32
    expected = BY_HAND[metric]
    assert ids.tolist() == [expected.ids]
    assert scores[0].tolist() == pytest.approx(expected.scores, abs=1e-6)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_brute_force_with_many_duplicates(metric: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    embedding = torch.randn(400, 24, generator=generator)
    embedding[100:200] = embedding[7]  # more equal rows than any margin
    embedding[200:260] = 0.0
    embedding[300] = 2.0 * embedding[301]  # cosine exactly 1 in mathematics
    embedding[310:330] = embedding[311] + 1e-4 * torch.randn(20, 24, generator=generator)
    embedding = embedding.to(dtype)
    excluded = (3, 150)
    index = ExactIndex(embedding, metric, exclude=excluded)
    tokens = [0, 7, 100, 150, 199, 210, 300, 301, 311, 320, 3]

    ids, scores = index.query(torch.tensor(tokens), 5)
    assert torch.isfinite(scores).all()
    for token, neighbors in zip(tokens, ids.tolist()):
        assert neighbors == all_neighbors(embedding, token, metric, excluded)[:5], token


@pytest.mark.parametrize("metric", METRICS)
def test_equals_brute_force_where_float32_products_cannot_tell(metric: str) -> None:
    """Rows that differ by less than a float32 product resolves: a large common part, small differences."""
    generator = torch.Generator().manual_seed(4)
    embedding = 1000.0 + 1e-3 * torch.randn(300, 32, generator=generator)
    ids, _ = ExactIndex(embedding, metric).query(torch.arange(40), 3)
    for token, neighbors in enumerate(ids.tolist()):
        assert neighbors == all_neighbors(embedding, token, metric)[:3]


@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_rounding_that_all_goes_one_way_changes_nothing(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 every element of token 1 loses, and half of token 2's gain: the order of the products is reversed."""
    embedding = torch.ones(4, 64)
    embedding[1] += 0.99 * 2.0**-8
    embedding[2, ::2] = 1.0 + 1.01 * 2.0**-8
    embedding[2, 1::2] = 1.0 + 0.8 * 2.0**-8
    embedding[3, 0] = -1.0
    if metric == "l2":
        embedding[0] = 2.0

    def rounded_products(index: ExactIndex, own: Tensor) -> Tensor:
        return own.bfloat16().float() @ embedding.bfloat16().float().T

    monkeypatch.setattr(ExactIndex, "_products", rounded_products)
    assert neighbors_of(ExactIndex(embedding, metric), token=0, k=1) == [nearest(embedding, 0, metric)]


def test_an_l1_distance_may_be_off_by_the_rounding_of_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distances to 1 and 2 are 2 and 2 + 2^-12, and the rounding reverses their order."""
    embedding = torch.tensor(
        [
            [0.0, 0.0],
            [1.0, 1.0],
            [1.0, 1.0 + 2.0**-12],
            [4.0, 4.0],
        ]
    )
    rounding = 1.0 + torch.tensor([0.0, 2.0**-11, -(2.0**-11), 0.0])

    def rounded_distances(index: ExactIndex, own: Tensor) -> Tensor:
        return -torch.cdist(own, embedding, p=1) * rounding

    monkeypatch.setattr(ExactIndex, "_products", rounded_distances)
    assert neighbors_of(ExactIndex(embedding, "l1"), token=0, k=1) == [1]


def test_vectors_of_every_size_have_directions() -> None:
    """Products of the smallest with the next larger ones underflow."""
    draws = torch.Generator().manual_seed(9)
    sizes = torch.tensor([1e-30, 5e-15, 1.0, 0.0]).repeat(20)
    embedding = torch.randn(80, 8, generator=draws) * sizes.unsqueeze(-1)
    ids, _ = ExactIndex(embedding).query(torch.arange(80), 1)
    for token, neighbors in enumerate(ids.tolist()):
        assert neighbors == [nearest(embedding, token, "cosine")]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_composition_changes_nothing(metric: str, dtype: torch.dtype) -> None:
    embedding = torch.randn(300, 40, generator=torch.Generator().manual_seed(6)).to(dtype)
    precomputed = ExactIndex(embedding, metric)
    precomputed.precompute(3)
    expected_ids, expected_scores = precomputed.query(torch.arange(300), 3)

    backwards = torch.arange(299, -1, -1)
    ids, scores = ExactIndex(embedding, metric).query(backwards, 3)
    assert torch.equal(ids, expected_ids[backwards])
    assert torch.equal(scores, expected_scores[backwards])

    asked_singly = ExactIndex(embedding, metric)
    for token in range(0, 300, 7):
        ids, scores = asked_singly.query(torch.tensor([token]), 3)
        assert torch.equal(ids[0], expected_ids[token])
        assert torch.equal(scores[0], expected_scores[token])


def test_zero_vectors_give_no_nan() -> None:
    """The cosine with a zero vector is -1, as far as can be; among equals the lower id comes first."""
    embedding = torch.tensor(
        [
            [0.0, 0.0],
            [1.0, 0.0],
            [1.0, 1.0],
            [0.0, 0.0],
            [1e-20, 0.0],
        ]
    )
    ids, scores = ExactIndex(embedding).query(torch.tensor([0, 1]), 4)
    assert ids.tolist() == [[1, 2, 3, 4], [4, 2, 0, 3]]
    assert scores[0].tolist() == [-1.0] * 4
    assert scores[1].tolist() == pytest.approx([1.0, 0.5**0.5, -1.0, -1.0])


def test_a_zero_vector_is_farther_than_any_other_that_is_not_opposite() -> None:
    """The cosine of (1, 0) and (-1, 0.5) is -2 / √5 > -1."""
    embedding = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.5]])
    ids, scores = ExactIndex(embedding).query(torch.tensor([0]), 1)
    assert ids.tolist() == [[2]]
    assert scores.item() == pytest.approx(-2 / 5**0.5)


def test_rows_are_remembered_and_a_larger_k_refills(monkeypatch: pytest.MonkeyPatch) -> None:
    index = ExactIndex(SMALL)
    searched: list[list[int]] = []
    search = index.search

    def noted_search(tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
        searched.append(tokens.tolist())
        return search(tokens, k)

    monkeypatch.setattr(index, "search", noted_search)
    index.query(torch.tensor([2, 0, 2]), 2)
    index.query(torch.tensor([0, 2]), 1)
    assert searched == [[0, 2]], "a smaller k is served from the rows"

    ids, _ = index.query(torch.tensor([0, 3]), 2)
    assert searched == [[0, 2], [3]], "only the row that is missing"
    assert ids[0].tolist() == [1, 2]

    assert neighbors_of(index, token=0, k=4) == [1, 2, 3, 4]
    index.precompute(4)
    index.query(torch.arange(5), 4)
    assert searched == [[0, 2], [3], [0], [1, 2, 3, 4]]


def test_a_device_index_fills_its_table_once_and_then_only_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of CUDA, taken on CPU: nothing after the first query may decide on values."""
    index = ExactIndex(SMALL)
    monkeypatch.setattr(index, "_lazy", False)
    assert neighbors_of(index, token=0, k=2) == [1, 2]
    assert index._filled.all()
    for method in ("_fill", "precompute", "_widen"):
        monkeypatch.setattr(index, method, None)
    monkeypatch.setattr(torch.Tensor, "__bool__", None)
    monkeypatch.setattr(torch.Tensor, "item", None)
    ids, _ = index.query(torch.tensor([0, 0]), 2)
    monkeypatch.undo()
    assert ids.tolist() == [[1, 2], [1, 2]]


def test_a_table_made_in_inference_mode_serves_outside_it() -> None:
    with torch.inference_mode():
        index = ExactIndex(SMALL)
        index.query(torch.tensor([0]), 2)
    assert neighbors_of(index, token=3, k=2) == neighbors_of(ExactIndex(SMALL), token=3, k=2)


def test_scores_of_a_parameter_have_no_gradient() -> None:
    index = ExactIndex(torch.nn.Parameter(SMALL.clone()))
    _, scores = index.query(torch.tensor([3]), 2)
    assert not scores.requires_grad


def query_small(tokens: list[int], k: int, exclude: tuple[int, ...] = ()) -> None:
    ExactIndex(SMALL, exclude=exclude).query(torch.tensor(tokens), k)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(
            lambda: ExactIndex(SMALL, "cosin"),
            ["'cosin'", "cosine, l2, l1, dot", "Did you mean 'cosine'?"],
            id="metric",
        ),
        pytest.param(
            lambda: ExactIndex(SMALL[0]),
            ["(2,)", "(V, D)"],
            id="shape",
        ),
        pytest.param(
            lambda: ExactIndex(SMALL, exclude=[5]),
            ["id 5", "[0, 4]"],
            id="excluded id",
        ),
        pytest.param(
            lambda: ExactIndex(SMALL / torch.tensor([1.0, 0.0])),
            ["row 0", "not finite"],
            id="infinite row",
        ),
        pytest.param(
            lambda: query_small([0], k=5),
            ["k=5", "[1, 4]"],
            id="k beyond the vocabulary",
        ),
        pytest.param(
            lambda: query_small([0], k=3, exclude=(1, 2)),
            ["k=3", "[1, 2]", "2 excluded"],
            id="k beyond what is not excluded",
        ),
        pytest.param(
            lambda: query_small([0, 5], k=2),
            ["token id 5", "[0, 4]"],
            id="token beyond the vocabulary",
        ),
        pytest.param(
            lambda: query_small([0, -1], k=2),
            ["token id -1", "[0, 4]"],
            id="negative token",
        ),
    ],
)
def test_errors_name_value_and_range(call: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        call()
    for word in words:
        assert word in str(error.value)


def test_half_precision_rows_are_multiplied_with_a_result_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, with sums that stray by as much as the proof allows, and to whichever side is wrong."""
    draws = torch.Generator().manual_seed(5)
    matrix = (1.0 + 0.05 * torch.randn(300, 64, generator=draws)).bfloat16()
    expected_ids, expected_scores = ExactIndex(matrix, lazy=False).query(torch.arange(300), 2)
    index = ExactIndex(matrix, lazy=False)
    multiplied: set[tuple[torch.dtype, ...]] = set()

    def straying_product(own: Tensor, rows: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        multiplied.add((own.dtype, rows.dtype, out_dtype))
        exact = own.double() @ rows.double()
        size = own.double().norm(dim=-1, keepdim=True) * rows.double().norm(dim=0)
        side = torch.randn(exact.shape, generator=draws).sign()
        return (exact + 2.0**-9 * size * side).float()

    monkeypatch.setattr(torch, "mm", straying_product)
    index._float32_results = True
    index._bfloat16_products = False
    ids, scores = index.query(torch.arange(300), 2)
    assert multiplied == {(torch.bfloat16, torch.bfloat16, torch.float32)}
    assert torch.equal(ids, expected_ids)
    assert torch.equal(scores, expected_scores)
