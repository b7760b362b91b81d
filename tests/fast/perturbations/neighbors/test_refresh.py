# SPDX-License-Identifier: Apache-2.0
"""Neighbor sets across weight syncs: the refresh policies, and the drift counted by hand."""

import pytest
import torch
from torch import Tensor

from perturbations import ExactIndex, Step, create
from perturbations.edit import realise
from perturbations.embeddings import matrix_embeddings
from perturbations.neighbors import Drift, Neighborhood, refresh, refresh_period
from perturbations.neighbors.base import Shard

# On a line, nearest by L2:          0→1  1→0  2→1   3→4   4→3
START = torch.tensor([[0.0], [1.0], [3.0], [10.0], [12.0]])
# With token 1 at 20:                0→2       2→0   3→4
AWAY = 20.0


class Line:
    """Embeddings on a line, where a weight sync moves a token."""

    def __init__(self) -> None:
        self.rows = START.clone()
        self.embeddings = matrix_embeddings(self.rows)
        self.drift = self.embeddings.drift

    def nearest(self, tokens: list[int], refresh: str = "every_sync") -> list[int]:
        """The nearest neighbor of each token."""
        ids, _ = self.embeddings.index("l2", refresh=refresh).query(torch.tensor(tokens), 1)
        return ids.flatten().tolist()

    def sync(self, place: float, token: int = 1) -> None:
        self.rows[token] = place
        self.embeddings.refresh()


# --- drift -----------------------------------------------------------------------------------------------


def test_drift_by_hand() -> None:
    line = Line()
    assert line.drift() is None
    assert line.nearest([0, 2, 3, 0]) == [1, 1, 4, 1]
    assert line.drift() is None, "no weight sync yet"

    line.sync(AWAY)
    # 0: {1} → {2}, 2: {1} → {0}, 3: {4} → {4}
    expected = Drift(tokens=3, changed_since_start=2, compared=3, changed=2)
    assert line.drift() == expected
    assert line.drift() == expected, "it is read, not taken"
    assert line.nearest([0, 2, 3]) == [2, 0, 4]

    line.sync(1.0)
    # All as at the start: 0 and 2 have changed once more, and none since the start.
    drift = line.drift()
    assert drift == Drift(tokens=3, changed_since_start=0, compared=3, changed=2)
    assert drift.shares() == {
        "neighbors_changed": pytest.approx(2 / 3),
        "neighbors_changed_since_start": 0.0,
    }


def test_a_sync_without_a_query_since_the_last_one_has_no_drift() -> None:
    matrix = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    neighborhood = Neighborhood(lambda shard, probe: ExactIndex(shard), lambda: matrix, every=1)
    neighborhood.query(torch.arange(5), 2)
    assert neighborhood.is_queried
    neighborhood.weights_changed()
    assert neighborhood.drift is not None
    assert not neighborhood.is_queried
    neighborhood.weights_changed()
    assert neighborhood.drift is None


# --- policies --------------------------------------------------------------------------------------------


def test_never_keeps_the_first_sets_and_says_what_would_have_changed() -> None:
    line = Line()
    assert line.nearest([0], "never") == [1]
    line.sync(AWAY)
    assert line.nearest([0, 2], "never") == [1, 1], "2 was not asked before, and has the set of the old weights"
    assert line.drift() == Drift(tokens=1, changed_since_start=1, compared=1, changed=1)

    line.sync(11.0, token=4)  # changes no set of these
    assert line.nearest([0, 2], "never") == [1, 1]
    # 0: {1} at the start, {2} before, {2} now. 2: {1} at the start, {0} now, and unknown before.
    assert line.drift() == Drift(tokens=2, changed_since_start=2, compared=1, changed=0)


def test_every_second_sync() -> None:
    line = Line()
    neighbors_after_syncs = [line.nearest([0], "2")]
    for place in (AWAY, AWAY, 1.0, 1.0):
        line.sync(place)
        neighbors_after_syncs.append(line.nearest([0], "2"))
    assert neighbors_after_syncs == [[1], [1], [2], [2], [1]]


@pytest.mark.parametrize("policy", ["never", "2"])
def test_a_set_first_asked_for_after_a_sync_is_of_the_weights_before(policy: str) -> None:
    """By L1, which keeps no norms of the old weights that would hide it."""
    line = Line()
    index = line.embeddings.index("l1", refresh=policy)
    line.sync(AWAY)
    ids, _ = index.query(torch.tensor([2]), 1)
    assert ids.tolist() == [[1]]


def test_several_loads_with_nothing_asked_between_are_one_sync() -> None:
    """OpenRLHF's broadcast loads parameter by parameter, and vLLM's reload calls load_weights inside."""
    line = Line()
    line.nearest([0], "2")
    for _ in range(3):
        line.sync(AWAY)
    assert line.nearest([0], "2") == [1]
    line.sync(AWAY)
    assert line.nearest([0], "2") == [2]


def test_mixtures_are_of_the_current_embeddings() -> None:
    """Anchor 0, kept neighbor 1: logits equal, so the mixture is (E[0] + E[1]) / 2: 0.5 at first, 10 after the sync."""
    line = Line()
    perturbation = create("neighbor", metric="l2", k=2, refresh="never")
    step = Step(
        logits=torch.tensor([[2.0, 2.0, 0.0, 0.0, 0.0]]),
        sampled=torch.tensor([0]),
        temperature=torch.ones(1),
        seeds=torch.ones(1, dtype=torch.int64),
        positions=torch.ones(1, dtype=torch.int64),
        embeddings=line.embeddings,
    )
    edit = perturbation.propose(step).edit
    assert realise(edit, line.embeddings.lookup, None).item() == pytest.approx(0.5)

    line.sync(AWAY)
    edit = perturbation.propose(step).edit
    assert edit.ids.tolist() == [[0, 1]]
    assert realise(edit, line.embeddings.lookup, None).item() == pytest.approx(10.0)


def test_the_scale_is_always_refreshed() -> None:
    """Mean squares: (1 + 9 + 100 + 144) / 5 = 50.8, then (400 + 9 + 100 + 144) / 5 = 130.6."""
    line = Line()
    line.nearest([0], "never")
    assert line.embeddings.rms().item() == pytest.approx(50.8**0.5)
    line.sync(AWAY)
    assert line.embeddings.rms().item() == pytest.approx(130.6**0.5)


def test_policies_are_read() -> None:
    assert refresh_period("every_sync") == 1
    assert refresh_period("never") is None
    assert refresh_period("12") == 12
    assert create("neighbor", refresh=3).refresh == "3"  # a YAML number
    with pytest.raises(ValueError, match="Did you mean 'every_sync'"):
        create("neighbor", refresh="every-sync")


# --- the path of CUDA, taken on a CPU --------------------------------------------------------------------


def test_the_hot_path_does_not_look_at_values(monkeypatch: pytest.MonkeyPatch) -> None:
    neighborhood = Neighborhood(lambda shard, probe: ExactIndex(shard, lazy=False), lambda: START, None)
    neighborhood.query(torch.tensor([0]), 1)
    monkeypatch.setattr(torch.Tensor, "__bool__", None)
    monkeypatch.setattr(torch.Tensor, "item", None)
    neighborhood.query(torch.tensor([2, 3]), 1)
    monkeypatch.undo()
    assert neighborhood._queried.tolist() == [True, False, True, True, False]


class TestOnADevice:
    """Tables are complete before weights change, and no matrix is copied."""

    @pytest.fixture(autouse=True)
    def _complete_tables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(refresh, "fills_on_demand", lambda device: False)

    def neighborhood(self, matrix: Tensor, policy: str) -> Neighborhood:
        def index(shard: Shard, probe: bool) -> ExactIndex:
            return ExactIndex(shard, "l2", lazy=probe)

        return Neighborhood(index, lambda: matrix, refresh_period(policy), "l2")

    def test_never_keeps_the_first_sets_without_a_copy_of_the_matrix(self) -> None:
        matrix = START.clone()
        neighborhood = self.neighborhood(matrix, "never")
        neighborhood.precompute(1)
        assert neighborhood._index._rows.data_ptr() == matrix.data_ptr()

        matrix[1] = 20.0
        neighborhood.weights_changed()
        ids, _ = neighborhood.query(torch.tensor([0, 2]), 1)
        assert ids.tolist() == [[1], [1]], "also where nobody had asked"
        ids, _ = neighborhood.query(torch.tensor([0]), 2)
        assert ids.tolist() == [[2, 3]], "a larger k: all again, of today's weights"

        matrix[1] = 1.0
        neighborhood.weights_changed()
        ids, _ = neighborhood.query(torch.tensor([0, 2]), 1)
        assert ids.tolist() == [[2], [0]]

    @pytest.mark.parametrize("policy", ["every_sync", "3"])
    def test_policies_give_what_an_index_made_anew_gives(self, policy: str) -> None:
        """Nothing is asked between every second sync and the next one."""
        draws = torch.Generator().manual_seed(0)
        tokens = torch.arange(400)
        matrix = torch.randn(400, 24, generator=draws)
        weights_of_sets = matrix.clone()
        neighborhood = self.neighborhood(matrix, policy)
        neighborhood.precompute(2)
        for sync in range(1, 8):
            matrix += 0.01 * torch.randn(matrix.shape, generator=draws)
            neighborhood.weights_changed()
            if sync % refresh_period(policy) == 0:
                weights_of_sets = matrix.clone()
            if sync % 2 == 1:
                ids, _ = neighborhood.query(tokens, 2)
                expected_ids, _ = ExactIndex(weights_of_sets, "l2").query(tokens, 2)
                assert torch.equal(ids, expected_ids)
