# SPDX-License-Identifier: Apache-2.0
"""Edits that are computed again, after a preemption or on the prompt of a further turn: in blocks, and bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ngrpo.rollout.input_override import InputOverride
from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations import ReplayRecord, create, streams
from perturbations.edit import InputEdit, realise
from perturbations.embeddings import matrix_embeddings
from perturbations.gates.default import BoundGate

V = 64
D = 16
ROWS = 4096
BLOCK = 1024
_DRAWS = np.random.default_rng(0)


def a_record(count: int, k: int, **fields: np.ndarray) -> ReplayRecord:
    """A record of ``count`` positions with ``k`` candidates each; all but the first position are perturbed."""
    ids = _DRAWS.integers(0, V, (count, k), dtype=np.int32)
    weights = _DRAWS.random((count, k), dtype=np.float32)
    return ReplayRecord(
        seed=77,
        prompt_tokens=count + 1,
        num_tokens=count + 1,
        positions=np.arange(1, count + 1, dtype=np.int32),
        ids=ids,
        weights=weights,
        agreed=np.ones(count, dtype=bool),
        **{"sigma": None, **fields},
    )


def table() -> nn.Module:
    torch.manual_seed(0)
    return nn.Embedding(V, D).requires_grad_(False)


def perturber_for(record: ReplayRecord, name: str = "gaussian") -> tuple[RolloutPerturber, nn.Module]:
    """A perturber with two requests: one of a single plain token, and one whose prompt the record covers."""
    perturbation = create(name, rate=1.0)
    device = torch.device("cpu")
    embedding = table()
    store = TrajectoryStore(2, ROWS, (V, D))
    gate = BoundGate(perturbation, lambda: [b"a", b"</think>", *[b"a"] * (V - 2)], V, store.slots, device)
    override = InputOverride(embedding, ROWS, 2, D, torch.float32, device)
    module = perturbation.module(D)
    if module is not None:
        module.requires_grad_(False)
    embeddings = matrix_embeddings(embedding.weight)
    perturber = RolloutPerturber(perturbation, store, gate, embeddings, override, device, module)
    store.open("plain", 1, 4, True)
    store.load(store.open("edited", record.seed, record.prompt_tokens, True), record)
    for request in ("plain", "edited"):
        perturber.opened(request)
    return perturber, embedding


def computed_again(record: ReplayRecord, name: str = "gaussian", at_once: int | None = None) -> Tensor:
    """What the prompt's rows are replaced with, (positions, D), where the first is plain."""
    perturber, embedding = perturber_for(record, name)
    if at_once is not None:
        perturber._candidates_at_once = at_once
    starts = np.array([0, 0])
    counts = np.array([4, record.prompt_tokens])
    with torch.inference_mode():
        perturber.begin(["plain", "edited"], starts, counts, np.zeros(2, dtype=bool))
    sources = embedding.override_sources
    replaced = (sources >= 0).nonzero()[:, 0]
    assert replaced.tolist() == (4 + record.positions).tolist()
    fed = torch.zeros(ROWS, D)
    fed[replaced] = embedding.override_vectors[sources[replaced]]
    return fed[4 : 4 + record.prompt_tokens]


def in_one_go(record: ReplayRecord) -> Tensor:
    """The same vectors, realised without blocks, (N, D)."""
    edit = InputEdit(
        torch.from_numpy(record.ids.astype(np.int64)),
        torch.from_numpy(record.weights),
        None if record.sigma is None else torch.from_numpy(record.sigma),
        None if record.vectors is None else torch.from_numpy(record.vectors),
    )
    positions = record.positions.astype(np.int64)
    noise_keys = streams.keys(np.full_like(positions, record.seed), positions, streams.Stream.NOISE)
    return realise(edit, table(), torch.from_numpy(noise_keys))


RECORDS = {
    "one candidate": lambda n: a_record(n, 1),
    "three candidates": lambda n: a_record(n, 3),
    "300 candidates": lambda n: a_record(n // 10, 300),
    "noise": lambda n: a_record(n, 3, sigma=_DRAWS.random(n, dtype=np.float32)),
    "vectors": lambda n: a_record(n, 1, vectors=_DRAWS.random((n, D), dtype=np.float32)),
}


@pytest.mark.parametrize("make_record", RECORDS.values(), ids=RECORDS)
def test_blocks_of_any_size_give_the_same_bits(make_record: Any) -> None:
    record = make_record(300)
    expected = in_one_go(record)
    for at_once in (None, 1, 29, 700, 1 << 40):
        fed = computed_again(record, at_once=at_once)
        assert torch.equal(fed[1:], expected), at_once
        assert not fed[0].any()


def test_what_was_rehearsed_may_be_had_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM measured its memory with 3,000 rows of five candidates: so there is room for as many."""
    perturber, _ = perturber_for(a_record(10, 3), "soft")
    assert perturber._candidates_at_once == BLOCK
    with torch.inference_mode():
        perturber.rehearse(torch.zeros(3000, V))
        assert perturber._candidates_at_once == 3000 * 5
        perturber.rehearse(torch.zeros(2, V))
    assert perturber._candidates_at_once == 3000 * 5, "the smaller batches of a warm-up leave it as it is"


def test_a_perturbations_module_sees_every_row() -> None:
    """Its matrix products may round with their number of rows, as they do from one decode step to the next."""
    record = a_record(50, 3)
    in_one_block = computed_again(record, "hrpo", at_once=1 << 40)
    in_small_blocks = computed_again(record, "hrpo", at_once=28)
    torch.testing.assert_close(in_small_blocks, in_one_block, rtol=1e-5, atol=1e-6)
    assert in_one_block[1:].any(dim=1).all()
