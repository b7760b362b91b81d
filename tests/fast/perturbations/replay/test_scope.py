# SPDX-License-Identifier: Apache-2.0
"""Where records are kept, and where they land in a batch."""

import asyncio
import dataclasses
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.rollout.settings import read_buffer
from ngrpo.trainers.openrlhf.rollout_actor import rollout_actor
from ngrpo.workbench.compare import runs
from ngrpo.workbench.compare.plan import read_plan
from perturbations import FinishedTrajectory, registry, replaying
from perturbations.replay.scope import ReplayScope, flat_rows
from perturbations.replay.trajectory import OVERHEAD
from perturbations.streams import Stream, keys, normal
from tests.support.replay_examples import Embedder, a_record, small


def test_truncate() -> None:
    short = a_record().truncate(556)
    assert short.positions.tolist() == [300, 301]
    assert (short.num_tokens, short.prompt_tokens) == (556, 300)
    assert a_record().truncate(100).prompt_tokens == 100
    assert a_record().truncate(9000) == a_record()


def finished(count: int) -> FinishedTrajectory:
    return FinishedTrajectory(a_record(count), np.zeros(10, np.float32))


def test_a_buffer_hands_over_once_and_drops() -> None:
    buffer = registry.buffers.create("memory")
    for name, count in (("a", 1), ("b", 2), ("c", 3), ("a", 4)):
        buffer.add(name, finished(count))
    buffer.drop(["c", "never there"])
    assert buffer.names() == ["b", "a"]
    assert len(buffer.take("a").record) == 4
    with pytest.raises(KeyError):
        buffer.take("a")
    assert buffer.names() == ["b"] and len(buffer) == 1
    assert registry.buffers.create(**buffer.spec()) == buffer == pickle.loads(pickle.dumps(buffer))


def test_a_full_buffer_drops_the_oldest_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    one = finished(4)
    assert one.size == 4 * (4 + 3 * 4 + 3 * 4 + 1) + 40 + OVERHEAD  # the arrays, and what holds them
    buffer = registry.buffers.create("memory", max_bytes=3 * one.size)
    for i in range(9):
        buffer.add(str(i), finished(4))
        buffer.add(str(i), finished(4))  # what is replaced does not count twice
    assert buffer.names() == ["6", "7", "8"]
    assert len(caplog.records) == 1 and "max_bytes" in caplog.text
    buffer.add("large", FinishedTrajectory(a_record(4), np.zeros(1000, np.float32)))
    assert buffer.names() == ["large"], "the newest is kept in any case"


BUFFER = """
from dataclasses import dataclass
from perturbations import ReplayBuffer, option, register_buffer

@register_buffer("counting")
@dataclass(frozen=True, kw_only=True)
class Counting(ReplayBuffer):
    most: int = option(2, "trajectories held", low=1)

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "held", {})

    def add(self, name, finished):
        self.held[name] = finished

    def names(self):
        return list(self.held)

    def take(self, name):
        return self.held.pop(name)
"""


def test_a_buffer_of_a_users_file_reaches_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the words of `ngrpo compare` to the configuration that a rollout actor gives vLLM, which has the text."""
    monkeypatch.setattr(registry.buffers, "registered", dict(registry.buffers.registered))
    counting = tmp_path / "counting.py"
    counting.write_text(BUFFER)
    ours = ["--perturbation.replay_buffer", f"{counting}:Counting", "--perturbation.replay_buffer.most", "5"]
    plan, _ = read_plan(["--perturbations", "none,neighbor", "--model", "smollm2-135m", "--task", "arithmetic", *ours])
    built: list[dict[str, Any]] = []

    async def answer(*_: Any) -> None:
        return None

    class Plain:
        executor, llm = None, SimpleNamespace(collective_rpc=answer)

        async def __init__(self, **kwargs: Any) -> None:
            built.append(kwargs["additional_config"])

    monkeypatch.setattr("ngrpo.rollout.records.confirm", answer)
    for run in plan.runs():
        settings = runs.run_config(plan, run, tmp_path)
        monkeypatch.setattr("ngrpo.config.run._current", settings)
        actor = object.__new__(rollout_actor(Plain))
        asyncio.run(actor.__init__(seed=1))
        assert settings.perturbation is None or built[-1]["perturbation"]["name"] == "neighbor"
    counting.unlink()  # an engine on another machine has no such file
    for config in built:
        buffer = read_buffer(config)
        assert type(buffer).__name__ == "Counting" and buffer.most == 5
    for name in "abc":
        buffer.add(name, finished(1))
    buffer.drop(["b", "x"])
    assert buffer.names() == ["a", "c"]


def test_rows_by_hand() -> None:
    """Two samples of 3 and 2 tokens: padded right, padded left, and packed."""
    sample, position = torch.tensor([0, 1, 1]), torch.tensor([2, 0, 2])
    right = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    left = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]])
    for mask, shape, want in ((right, (2, 4), [2, 4]), (left, (2, 4), [3, 6]), (right, (1, 5), [2, 3])):
        rows, inside = flat_rows(sample, position, shape, mask)
        assert inside.tolist() == [True, True, False]  # the last position was cut off
        assert rows[:2].tolist() == want
    assert flat_rows(sample, position, (1, 3), None)[1].tolist() == [True, False, False], "a batch of the first sample"
    with pytest.raises(ValueError, match="ring attention"):
        flat_rows(sample, position, (1, 3), right)


def test_substitution_by_hand() -> None:
    model, tokens = Embedder(), torch.tensor([[0, 5, 6], [7, 8, 9]])
    with replaying(model, [small([1]), None]) as stats:
        output = model(tokens)
    assert output.tolist() == [[[0, 1], [4, 5], [12, 13]], [[14, 15], [16, 17], [18, 19]]]
    # E[5] = (10, 11): shift = |(-6, -6)| / |(10, 11)| = sqrt(72 / 221).
    assert stats.mean_shift() == pytest.approx((72 / 221) ** 0.5) and stats.count() == 1
    with torch.no_grad():
        model.embedding.weight[5] = 0.0  # as of a padding_idx
    with replaying(model, [small([1]), None]) as stats:
        model(tokens)
    assert stats.mean_shift() == 0.0, "a share of nothing"
    model = Embedder()
    assert model(tokens)[0, 1].tolist() == [10, 11], "the hooks are gone after the scope"


def test_inputs_that_left_their_anchor() -> None:
    """Of (4, 5), half of (2, 3) and half of (6, 7), the cosine with (4, 5) itself is largest: token 2, not 1 or 3.

    A weight of 0 on all but the anchor leaves it where it is, and a position that was cut off does not count.
    """
    embedding, tokens = Embedder().get_input_embeddings(), torch.tensor([[0, 5, 6]])
    still = dataclasses.replace(small([1, 2, 3]), weights=np.array([[1, 0], [0.5, 0.5], [0.5, 0.5]], np.float32))
    for most, looked_at, left in ((8, 2, 1), (1, 1, 1), (0, 0, 0)):
        with ReplayScope(embedding, look_up=most)([still], None) as stats:
            embedding(tokens)
        assert (int(sum(stats.looked_at)), int(sum(stats.left_anchor))) == (looked_at, left)


def test_noise_is_drawn_again_from_the_seed() -> None:
    model = Embedder()
    with replaying(model, [small([1], sigma=0.5)]):
        output = model(torch.tensor([[0, 5, 6]]))
    noise = normal(keys(torch.tensor([9]), torch.tensor([1]), Stream.NOISE), 2)
    assert torch.equal(output[0, 1], torch.tensor([4.0, 5.0]) + 0.5 * noise[0])
    with replaying(model, [small([1], sigma=0.5), small([1])]):
        both = model(torch.tensor([[0, 5, 6], [0, 5, 6]]))[:, 1]
    assert torch.equal(both[0], output[0, 1])
    assert both[1].tolist() == [4, 5], "a record without noise beside one with it"


def test_records_and_batch_must_fit() -> None:
    model = Embedder()
    with pytest.raises(ValueError, match="1 records for a batch of 2"), replaying(model, [small([1])]):
        model(torch.tensor([[0, 5, 6], [7, 8, 9]]))
    assert model(torch.tensor([[5]])).tolist() == [[[10, 11]]], "a failed forward leaves no hook behind"


def test_a_narrow_record_beside_a_wide_one() -> None:
    """Row 2 alone is (4, 5), as the half of rows 1 and 3 is."""
    model = Embedder()
    narrow = dataclasses.replace(small([1]), ids=np.array([[2]], np.int32), weights=np.ones((1, 1), np.float32))
    with replaying(model, [narrow, small([1])]):
        assert model(torch.tensor([[0, 5, 6], [7, 8, 9]]))[:, 1].tolist() == [[4, 5], [4, 5]]
