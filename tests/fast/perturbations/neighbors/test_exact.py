# SPDX-License-Identifier: Apache-2.0
"""The exact index against hand-derived order, brute force in float64, and awkward embeddings."""

import pytest
import torch
from torch import Tensor

from perturbations.neighbors import ExactIndex

# From token 0 = (1, 0):   cosine  dot   L2      L1
#   1 = (4, 3)              0.8     4    √18      6
#   2 = (6, 8)              0.6     6    √89     13
#   3 = (0, 1)              0       0    √2       2
#   4 = (-1, 0)            -1      -1     2       2   (ties with 3 in L1: the lower id first)
SMALL = torch.tensor([[1.0, 0.0], [4.0, 3.0], [6.0, 8.0], [0.0, 1.0], [-1.0, 0.0]])
BY_HAND = {
    "cosine": ([1, 2, 3, 4], [0.8, 0.6, 0.0, -1.0]),
    "dot": ([2, 1, 3, 4], [6.0, 4.0, 0.0, -1.0]),
    "l2": ([3, 4, 1, 2], [-(2**0.5), -2.0, -(18**0.5), -(89**0.5)]),
    "l1": ([3, 4, 1, 2], [-2.0, -2.0, -6.0, -13.0]),
}
METRICS = list(BY_HAND)


def brute(embedding: torch.Tensor, token: int, metric: str, exclude: tuple[int, ...] = ()) -> list[int]:
    """All neighbors of a token, by float64 scores rounded to float32 and then by id."""
    rows, own = embedding.double(), embedding[token].double()
    if metric == "cosine":
        norms = rows.norm(dim=-1) * own.norm()
        scores = torch.where(norms > 0, (rows * own).sum(-1) / norms, -1.0)
    elif metric == "dot":
        scores = (rows * own).sum(-1)
    else:
        scores = -torch.linalg.vector_norm(rows - own, ord=1 if metric == "l1" else 2, dim=-1)
    scores = scores.float().tolist()
    others = [i for i in range(len(scores)) if i != token and i not in exclude]
    return sorted(others, key=lambda i: (-scores[i], i))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_order_and_scores_by_hand(metric: str, dtype: torch.dtype) -> None:
    ids, scores = ExactIndex(SMALL.to(dtype), metric).query(torch.tensor([0]), 4)
    assert ids.dtype == torch.int64 and scores.dtype == torch.float32
    assert ids.tolist() == [BY_HAND[metric][0]]
    assert scores[0].tolist() == pytest.approx(BY_HAND[metric][1], abs=1e-6)


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
    index = ExactIndex(embedding, metric, exclude=(3, 150))
    tokens = torch.tensor([0, 7, 100, 150, 199, 210, 300, 301, 311, 320, 3])
    ids, scores = index.query(tokens, 5)
    assert torch.isfinite(scores).all()
    for token, row in zip(tokens.tolist(), ids.tolist()):
        assert row == brute(embedding, token, metric, (3, 150))[:5], token


@pytest.mark.parametrize("metric", METRICS)
def test_equals_brute_force_where_float32_products_cannot_tell(metric: str) -> None:
    """Rows that differ by less than a float32 product resolves: a large common part, small differences."""
    generator = torch.Generator().manual_seed(4)
    embedding = 1000.0 + 1e-3 * torch.randn(300, 32, generator=generator)
    index = ExactIndex(embedding, metric)
    ids, _ = index.query(torch.arange(40), 3)
    assert ids.tolist() == [brute(embedding, i, metric)[:3] for i in range(40)]


@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_rounding_that_all_goes_one_way_changes_nothing(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 every element of token 1 loses, and half of token 2's gain: the order of the products is reversed."""
    embedding = torch.ones(4, 64)
    embedding[1] += 0.99 * 2.0**-8
    embedding[2, ::2], embedding[2, 1::2] = 1.0 + 1.01 * 2.0**-8, 1.0 + 0.8 * 2.0**-8
    embedding[3, 0] = -1.0
    if metric == "l2":
        embedding[0] = 2.0
    rounded = embedding.bfloat16().float()
    monkeypatch.setattr(ExactIndex, "_products", lambda self, own: own.bfloat16().float() @ rounded.T)
    assert ExactIndex(embedding, metric).query(torch.tensor([0]), 1)[0].item() == brute(embedding, 0, metric)[0]


def test_an_l1_distance_may_be_off_by_the_rounding_of_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0 + 2.0**-12], [4.0, 4.0]])
    off = 1.0 + torch.tensor([0.0, 2.0**-11, -(2.0**-11), 0.0])
    monkeypatch.setattr(ExactIndex, "_products", lambda self, own: -torch.cdist(own, embedding, p=1) * off)
    assert ExactIndex(embedding, "l1").query(torch.tensor([0]), 1)[0].tolist() == [[1]]


def test_vectors_of_every_size_have_directions() -> None:
    """Products of the smallest with the next larger ones underflow."""
    draws = torch.Generator().manual_seed(9)
    embedding = torch.randn(80, 8, generator=draws) * torch.tensor([1e-30, 5e-15, 1.0, 0.0]).repeat(20).unsqueeze(-1)
    ids, _ = ExactIndex(embedding).query(torch.arange(80), 1)
    assert ids.tolist() == [brute(embedding, i, "cosine")[:1] for i in range(80)]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_composition_changes_nothing(metric: str, dtype: torch.dtype) -> None:
    embedding = torch.randn(300, 40, generator=torch.Generator().manual_seed(6)).to(dtype)
    whole = ExactIndex(embedding, metric)
    whole.precompute(3)
    want_ids, want_scores = whole.query(torch.arange(300), 3)
    singly, backwards = ExactIndex(embedding, metric), ExactIndex(embedding, metric)
    batches = [(singly, torch.tensor([token])) for token in range(0, 300, 7)]
    for index, tokens in (*batches, (backwards, torch.arange(299, -1, -1))):
        ids, scores = index.query(tokens, 3)
        assert torch.equal(ids, want_ids[tokens]) and torch.equal(scores, want_scores[tokens])


def test_zero_vectors_give_no_nan() -> None:
    """The cosine with a zero vector is -1, as far as can be; among equals the lower id comes first."""
    embedding = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1e-20, 0.0]])
    ids, scores = ExactIndex(embedding).query(torch.tensor([0, 1]), 4)
    assert ids.tolist() == [[1, 2, 3, 4], [4, 2, 0, 3]]
    assert scores[0].tolist() == [-1.0] * 4
    assert scores[1].tolist() == pytest.approx([1.0, 0.5**0.5, -1.0, -1.0])


def test_a_zero_vector_is_farther_than_any_other_that_is_not_opposite() -> None:
    embedding = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.5]])
    ids, scores = ExactIndex(embedding).query(torch.tensor([0]), 1)
    assert ids.tolist() == [[2]] and scores.item() == pytest.approx(-2 / 5**0.5)


def test_rows_are_remembered_and_a_larger_k_refills(monkeypatch: pytest.MonkeyPatch) -> None:
    index = ExactIndex(SMALL)
    filled: list[list[int]] = []
    fill = index.search
    monkeypatch.setattr(index, "search", lambda tokens, k: (filled.append(tokens.tolist()), fill(tokens, k))[1])
    index.query(torch.tensor([2, 0, 2]), 2)
    index.query(torch.tensor([0, 2]), 1)
    assert filled == [[0, 2]]
    ids, _ = index.query(torch.tensor([0, 3]), 2)
    assert filled == [[0, 2], [3]] and ids[0].tolist() == [1, 2]
    assert index.query(torch.tensor([0]), 4)[0].tolist() == [[1, 2, 3, 4]]
    index.precompute(4)
    index.query(torch.arange(5), 4)
    assert filled == [[0, 2], [3], [0], [1, 2, 3, 4]]


def test_a_device_index_fills_its_table_once_and_then_only_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of CUDA, taken on CPU: nothing after the first query may decide on values."""
    index = ExactIndex(SMALL)
    monkeypatch.setattr(index, "_lazy", False)
    assert index.query(torch.tensor([0]), 2)[0].tolist() == [[1, 2]]
    assert index._filled.all()
    for name in ("_fill", "precompute", "_widen"):
        monkeypatch.setattr(index, name, None)
    monkeypatch.setattr(torch.Tensor, "__bool__", None)
    monkeypatch.setattr(torch.Tensor, "item", None)
    ids, _ = index.query(torch.tensor([0, 0]), 2)
    monkeypatch.undo()
    assert ids.tolist() == [[1, 2], [1, 2]]


def test_a_table_made_in_inference_mode_serves_outside_it() -> None:
    with torch.inference_mode():
        index = ExactIndex(SMALL)
        index.query(torch.tensor([0]), 2)
    parameter = torch.nn.Parameter(SMALL.clone())
    outside = ExactIndex(parameter)
    assert index.query(torch.tensor([3]), 2)[0].tolist() == outside.query(torch.tensor([3]), 2)[0].tolist()
    assert not outside.query(torch.tensor([3]), 2)[1].requires_grad


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ExactIndex(SMALL, "cosin"), ["'cosin'", "cosine, l2, l1, dot", "Did you mean 'cosine'?"]),
        (lambda: ExactIndex(SMALL[0]), ["(2,)", "(V, D)"]),
        (lambda: ExactIndex(SMALL, exclude=[5]), ["id 5", "[0, 4]"]),
        (lambda: ExactIndex(SMALL / torch.tensor([1.0, 0.0])), ["row 0", "not finite"]),
        (lambda: ExactIndex(SMALL).query(torch.tensor([0]), 5), ["k=5", "[1, 4]"]),
        (lambda: ExactIndex(SMALL, exclude=[1, 2]).query(torch.tensor([0]), 3), ["k=3", "[1, 2]", "2 excluded"]),
        (lambda: ExactIndex(SMALL).query(torch.tensor([0, 5]), 2), ["token id 5", "[0, 4]"]),
        (lambda: ExactIndex(SMALL).query(torch.tensor([0, -1]), 2), ["token id -1", "[0, 4]"]),
    ],
)
def test_errors_name_value_and_range(call, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert all(word in str(error.value) for word in words)


def test_half_precision_rows_are_multiplied_with_a_result_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, with sums that stray by as much as the proof allows, and to whichever side is wrong."""
    draws = torch.Generator().manual_seed(5)
    matrix = (1.0 + 0.05 * torch.randn(300, 64, generator=draws)).bfloat16()
    want, asked = ExactIndex(matrix, lazy=False).query(torch.arange(300), 2), []
    index = ExactIndex(matrix, lazy=False)

    def mm(own: Tensor, rows: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        asked.append((own.dtype, rows.dtype, out_dtype))
        exact = own.double() @ rows.double()
        size = own.double().norm(dim=-1, keepdim=True) * rows.double().norm(dim=0)
        return (exact + 2.0**-9 * size * torch.randn(exact.shape, generator=draws).sign()).float()

    monkeypatch.setattr(torch, "mm", mm)
    index._float32_results, index._bfloat16_products = True, False
    found = index.query(torch.arange(300), 2)
    assert set(asked) == {(torch.bfloat16, torch.bfloat16, torch.float32)}
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
