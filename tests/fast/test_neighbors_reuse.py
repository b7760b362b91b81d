# SPDX-License-Identifier: Apache-2.0
"""Neighbor tables through weight syncs: rows that are proven unchanged are not searched, and nothing else differs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perturbations.neighbors import ExactIndex, Neighborhood, refresh, refresh_period

V, D = 400, 24
METRICS = ("cosine", "l2", "l1")


def complete(matrix: Tensor, metric: str, k: int = 2, exclude: tuple[int, ...] = ()) -> ExactIndex:
    """An index as on a GPU: its table is computed as a whole, and kept for the next."""
    index = ExactIndex(matrix, metric, exclude, lazy=False)
    index.follow()
    index.precompute(k)
    return index


def carried(old: ExactIndex, matrix: Tensor, exclude: tuple[int, ...] = ()) -> tuple[ExactIndex, int]:
    """The index of the next weights, and how many of its rows were searched."""
    new, searched = ExactIndex(matrix, old.metric, exclude, lazy=False), []
    search = new.search
    new.search = lambda tokens, k: (searched.append(len(tokens)), search(tokens, k))[1]
    new.follow()
    new.take_over(old)
    new.precompute(old.width)
    new.search = search
    return new, sum(searched)


def same(found: ExactIndex, matrix: Tensor, exclude: tuple[int, ...] = ()) -> None:
    tokens = torch.arange(len(matrix))
    full = ExactIndex(matrix.clone(), found.metric, exclude, lazy=False)
    for mine, wanted in zip(found.query(tokens, found.width), full.query(tokens, found.width)):
        assert torch.equal(mine, wanted)


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drift(rows: Tensor, seed: int) -> None:
    """As bfloat16 weights move: one element in two hundred by its last bit."""
    flipped = torch.rand(rows.shape, generator=torch.Generator().manual_seed(seed)) < 0.005
    rows.mul_(1.0 + 2.0**-8 * flipped.float() * some(*rows.shape, seed=seed).sign())


def jump(rows: Tensor, seed: int) -> None:
    """Three tokens move next to others, one of them next to many."""
    rows[5] = rows[7] * 1.01
    rows[9] = rows[100:200].mean(dim=0)
    rows[11] = -rows[11]
    drift(rows, seed)


def vanish(rows: Tensor, seed: int) -> None:
    rows[13] = 0.0
    rows[17], rows[19] = rows[23], rows[23]
    rows[3] = rows[29]  # which is excluded


def all_move(rows: Tensor, seed: int) -> None:
    rows.add_(0.3 * some(*rows.shape, seed=seed))


def come_back(rows: Tensor, seed: int) -> None:
    rows[13] = rows[14] + 0.01


CHANGES: tuple[Callable[[Tensor, int], None], ...] = (
    lambda rows, seed: None, drift, drift, jump, drift, vanish, drift, come_back, all_move, drift,
)  # fmt: skip


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_syncs_in_a_row_give_what_a_full_search_gives(metric: str, dtype: torch.dtype) -> None:
    rows, matrix = 2.0 * some(V, D, seed=1), torch.zeros(V, D, dtype=dtype)
    rows[40:60] = rows[40] + 1e-3 * some(20, D, seed=2)  # nearly equal ones, which every change puts in doubt
    matrix.copy_(rows)
    index, searched = complete(matrix, metric, exclude=(3, 150)), []
    for seed, change in enumerate(CHANGES):
        change(rows, seed)
        matrix.copy_(rows)  # in place, as an engine's weights change
        index, count = carried(index, matrix, (3, 150))
        same(index, matrix, (3, 150))
        searched.append(count)
    assert searched[0] == 0
    assert all(0 < count < V // 2 for count in (searched[1], searched[3])), searched
    assert searched[8] > 0.9 * V


@pytest.mark.parametrize("metric", METRICS)
def test_small_tables_where_everything_is_close(metric: str) -> None:
    """Twelve tokens in two dimensions: most changes change a set, and ties are common (a grid)."""
    draws, changed, kept = torch.Generator().manual_seed(0), 0, 0
    for trial in range(20):
        grid = 2.0 ** -(trial % 9)
        matrix = torch.randint(-3, 4, (12, 2), generator=draws).float() + 8.0 * (trial % 2)
        index = complete(matrix, metric, k=1 + trial % 3)
        for _ in range(3):
            before = index.query(torch.arange(12), index.width)[0].clone()
            who = torch.rand(12, generator=draws) < 0.3
            matrix += grid * who.unsqueeze(-1) * torch.randint(-1, 2, (12, 2), generator=draws)
            index, count = carried(index, matrix)
            same(index, matrix)
            changed += int((before != index.query(torch.arange(12), index.width)[0]).any())
            kept += 12 - count
    assert changed > 20 and kept > 100


@pytest.mark.parametrize("case", ["dot", "excluded", "lazy", "not complete"])
def test_what_cannot_be_carried_is_searched(case: str) -> None:
    matrix = some(60, 8)
    old = ExactIndex(matrix, "dot" if case == "dot" else "cosine", lazy=case == "lazy")
    old.follow()
    if case != "not complete":
        old.query(torch.arange(5), 2)
    matrix[3] = matrix[30]
    new = ExactIndex(matrix, old.metric, [30] if case == "excluded" else [], lazy=False)
    new.follow()
    new.take_over(old)
    assert new.width == 0
    same(complete(matrix, old.metric), matrix)


class TestOnADevice:
    """The path of CUDA, taken on a CPU: tables are complete before weights change, and no matrix is copied."""

    @pytest.fixture(autouse=True)
    def _complete_tables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(refresh, "rows_on_demand", lambda matrix: False)

    def neighborhood(self, matrix: Tensor, policy: str) -> Neighborhood:
        return Neighborhood(
            lambda shard, probe: ExactIndex(shard, "l2", lazy=probe), lambda: matrix, refresh_period(policy), "l2"
        )

    def test_never_keeps_the_first_sets_without_a_copy_of_the_matrix(self) -> None:
        matrix = torch.tensor([[0.0], [1.0], [3.0], [10.0], [12.0]])
        found = self.neighborhood(matrix, "never")
        found.precompute(1)
        assert found._index._rows.data_ptr() == matrix.data_ptr() and found._index._before is None
        matrix[1] = 20.0
        found.weights_changed()
        assert found.query(torch.tensor([0, 2]), 1)[0].tolist() == [[1], [1]], "also where nobody had asked"
        assert found.query(torch.tensor([0]), 2)[0].tolist() == [[2, 3]], "a larger k: all anew, of today's weights"
        matrix[1] = 1.0
        found.weights_changed()
        assert found.query(torch.tensor([0, 2]), 1)[0].tolist() == [[2], [0]]

    @pytest.mark.parametrize("policy", ["every_sync", "3"])
    def test_policies_give_what_an_index_made_anew_gives(self, policy: str) -> None:
        matrix, every = some(V, D), refresh_period(policy)
        found, of_weights = self.neighborhood(matrix, policy), matrix.clone()
        found.precompute(2)
        for sync in range(1, 8):
            drift(matrix, sync)
            found.weights_changed()  # with nothing asked in between too
            if sync % every == 0:
                of_weights = matrix.clone()
            if sync % 2:
                same_sets = ExactIndex(of_weights, "l2").query(torch.arange(V), 2)[0]
                assert torch.equal(found.query(torch.arange(V), 2)[0], same_sets)


def test_half_precision_rows_are_multiplied_with_a_result_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, with sums that stray by as much as the proof allows, and to whichever side is wrong."""
    matrix = (1.0 + 0.05 * some(300, 64, seed=5)).bfloat16()
    want, asked = complete(matrix, "cosine").query(torch.arange(300), 2), []
    index = ExactIndex(matrix, lazy=False)

    def mm(own: Tensor, rows: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        asked.append((own.dtype, rows.dtype, out_dtype))
        exact = own.double() @ rows.double()
        size = own.double().norm(dim=-1, keepdim=True) * rows.double().norm(dim=0)
        return (exact + 2.0**-9 * size * some(*exact.shape, seed=6).sign()).float()

    monkeypatch.setattr(torch, "mm", mm)
    index._mixed, index._native = True, False
    found = index.query(torch.arange(300), 2)
    assert set(asked) == {(torch.bfloat16, torch.bfloat16, torch.float32)}
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
