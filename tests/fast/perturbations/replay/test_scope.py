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
from torch import Tensor

from ngrpo.rollout.settings import read_buffer
from ngrpo.trainers.openrlhf.rollout_actor import rollout_actor
from ngrpo.workbench.compare import runs
from ngrpo.workbench.compare.plan import read_plan
from perturbations import FinishedTrajectory, registry, replaying
from perturbations.replay.flat_records import flat_rows
from perturbations.replay.scope import ReplayScope
from perturbations.replay.trajectory import OVERHEAD
from perturbations.streams import Stream, keys, normal
from tests.support.replay_examples import Embedder, a_record, small


def test_truncate_drops_later_positions() -> None:
    """The record has positions 300, 301, 556 and 8999 after a prompt of 300 tokens."""
    truncated = a_record().truncate(556)
    assert truncated.positions.tolist() == [300, 301]
    assert truncated.num_tokens == 556
    assert truncated.prompt_tokens == 300


def test_truncate_within_the_prompt_and_at_the_end() -> None:
    assert a_record().truncate(100).prompt_tokens == 100
    assert a_record().truncate(9000) == a_record()


# --- the buffer in memory ----------------------------------------------------------------------------


def finished(count: int) -> FinishedTrajectory:
    """A trajectory with this many perturbed positions and ten generated tokens."""
    return FinishedTrajectory(a_record(count), np.zeros(10, np.float32))


def test_a_buffer_hands_over_once_and_drops() -> None:
    buffer = registry.buffers.create("memory")
    buffer.add("a", finished(1))
    buffer.add("b", finished(2))
    buffer.add("c", finished(3))
    buffer.add("a", finished(4))
    buffer.drop(["c", "never there"])
    assert buffer.names() == ["b", "a"]

    assert len(buffer.take("a").record) == 4
    with pytest.raises(KeyError):
        buffer.take("a")
    assert buffer.names() == ["b"]
    assert len(buffer) == 1


def test_a_buffer_is_its_spec_and_can_be_pickled() -> None:
    buffer = registry.buffers.create("memory")
    buffer.add("a", finished(1))
    assert registry.buffers.create(**buffer.spec()) == buffer
    assert pickle.loads(pickle.dumps(buffer)) == buffer


def test_the_size_of_a_trajectory() -> None:
    """The arrays of four positions with three candidates, ten log-probabilities, and what holds them."""
    bytes_per_position = 4 + 3 * 4 + 3 * 4 + 1
    assert finished(4).size == 4 * bytes_per_position + 10 * 4 + OVERHEAD


def test_a_full_buffer_drops_the_oldest_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    buffer = registry.buffers.create("memory", max_bytes=3 * finished(4).size)
    for number in range(9):
        buffer.add(str(number), finished(4))
        buffer.add(str(number), finished(4))  # what is replaced does not count twice
    assert buffer.names() == ["6", "7", "8"]
    assert len(caplog.records) == 1
    assert "max_bytes" in caplog.text


def test_a_full_buffer_keeps_the_newest_in_any_case() -> None:
    buffer = registry.buffers.create("memory", max_bytes=3 * finished(4).size)
    buffer.add("small", finished(4))
    buffer.add("large", FinishedTrajectory(a_record(4), np.zeros(1000, np.float32)))
    assert buffer.names() == ["large"]


# --- a user's buffer ---------------------------------------------------------------------------------

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


async def no_answer(*_: Any) -> None:
    return None


def test_a_buffer_of_a_users_file_reaches_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the words of `ngrpo compare` to the configuration that a rollout actor gives vLLM, which has the text."""
    monkeypatch.setattr(registry.buffers, "registered", dict(registry.buffers.registered))
    user_file = tmp_path / "counting.py"
    user_file.write_text(BUFFER)
    words = ["--perturbations", "none,neighbor", "--model", "smollm2-135m", "--task", "arithmetic"]
    words += ["--perturbation.replay_buffer", f"{user_file}:Counting"]
    words += ["--perturbation.replay_buffer.most", "5"]
    plan, _ = read_plan(words)
    engine_configs: list[dict[str, Any]] = []

    class PlainRolloutActor:
        executor = None
        llm = SimpleNamespace(collective_rpc=no_answer)

        async def __init__(self, **kwargs: Any) -> None:
            engine_configs.append(kwargs["additional_config"])

    monkeypatch.setattr("ngrpo.rollout.records.confirm", no_answer)
    for run in plan.runs():
        settings = runs.run_config(plan, run, tmp_path)
        monkeypatch.setattr("ngrpo.config.run._current", settings)
        actor = object.__new__(rollout_actor(PlainRolloutActor))
        asyncio.run(actor.__init__(seed=1))
        if settings.perturbation is not None:
            assert engine_configs[-1]["perturbation"]["name"] == "neighbor"

    user_file.unlink()  # an engine on another machine has no such file
    assert engine_configs
    for config in engine_configs:
        buffer = read_buffer(config)
        assert type(buffer).__name__ == "Counting"
        assert buffer.most == 5
        for name in "abc":
            buffer.add(name, finished(1))
        buffer.drop(["b", "x"])
        assert buffer.names() == ["a", "c"]


# --- rows of a batch ---------------------------------------------------------------------------------

# Two samples of 3 and 2 tokens.
PADDED_RIGHT = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
PADDED_LEFT = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]])
# Position 2 of the first sample, positions 0 and 2 of the second, of which the last was cut off.
SAMPLES = torch.tensor([0, 1, 1])
POSITIONS = torch.tensor([2, 0, 2])


@pytest.mark.parametrize(
    ("mask", "shape", "expected"),
    [
        pytest.param(PADDED_RIGHT, (2, 4), [2, 4], id="padded right"),
        pytest.param(PADDED_LEFT, (2, 4), [3, 6], id="padded left"),
        pytest.param(PADDED_RIGHT, (1, 5), [2, 3], id="packed"),
    ],
)
def test_rows_by_hand(mask: Tensor, shape: tuple[int, int], expected: list[int]) -> None:
    rows, is_inside = flat_rows(SAMPLES, POSITIONS, shape, mask)
    assert is_inside.tolist() == [True, True, False]
    assert rows[:2].tolist() == expected


def test_rows_of_a_batch_of_the_first_sample() -> None:
    _, is_inside = flat_rows(SAMPLES, POSITIONS, (1, 3), None)
    assert is_inside.tolist() == [True, False, False]


def test_rows_of_a_part_of_a_packed_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="ring attention"):
        flat_rows(SAMPLES, POSITIONS, (1, 3), PADDED_RIGHT)


# --- what a forward is fed ---------------------------------------------------------------------------

ONE_SAMPLE = torch.tensor([[0, 5, 6]])
TWO_SAMPLES = torch.tensor([[0, 5, 6], [7, 8, 9]])


def test_substitution_by_hand() -> None:
    """E[5] = (10, 11): shift = |(-6, -6)| / |(10, 11)| = sqrt(72 / 221)."""
    model = Embedder()
    with replaying(model, [small([1]), None]) as stats:
        output = model(TWO_SAMPLES)
    assert output[0].tolist() == [[0, 1], [4, 5], [12, 13]]
    assert output[1].tolist() == [[14, 15], [16, 17], [18, 19]]
    assert stats.mean_shift() == pytest.approx((72 / 221) ** 0.5)
    assert stats.count() == 1
    assert model(TWO_SAMPLES)[0, 1].tolist() == [10, 11], "the hooks are gone after the scope"


def test_the_shift_from_a_zero_vector_is_a_share_of_nothing() -> None:
    """As of a padding_idx."""
    model = Embedder()
    with torch.no_grad():
        model.embedding.weight[5] = 0.0
    with replaying(model, [small([1]), None]) as stats:
        model(TWO_SAMPLES)
    assert stats.count() == 1
    assert stats.mean_shift() == 0.0


@pytest.mark.parametrize(
    ("look_up", "looked_at", "left_anchor"),
    [
        pytest.param(8, 2, 1, id="all"),
        pytest.param(1, 1, 1, id="one of two"),
        pytest.param(0, 0, 0, id="none"),
    ],
)
def test_inputs_that_left_their_anchor(look_up: int, looked_at: int, left_anchor: int) -> None:
    """Of (4, 5), half of (2, 3) and half of (6, 7), the cosine with (4, 5) itself is largest: token 2, not 1 or 3.

    A weight of 0 on all but the anchor leaves it where it is, and a position that was cut off does not count.
    """
    embedding = Embedder().get_input_embeddings()
    weights = np.array([[1, 0], [0.5, 0.5], [0.5, 0.5]], np.float32)
    record = dataclasses.replace(small([1, 2, 3]), weights=weights)
    with ReplayScope(embedding, look_up=look_up)([record], None) as stats:
        embedding(ONE_SAMPLE)
    assert int(sum(stats.looked_at)) == looked_at
    assert int(sum(stats.left_anchor)) == left_anchor


def test_noise_is_drawn_again_from_the_seed() -> None:
    model = Embedder()
    with replaying(model, [small([1], sigma=0.5)]):
        output = model(ONE_SAMPLE)
    noise = normal(keys(torch.tensor([9]), torch.tensor([1]), Stream.NOISE), 2)
    assert torch.equal(output[0, 1], torch.tensor([4.0, 5.0]) + 0.5 * noise[0])


def test_a_record_without_noise_beside_one_with_it() -> None:
    model = Embedder()
    with replaying(model, [small([1], sigma=0.5)]):
        alone = model(ONE_SAMPLE)
    with replaying(model, [small([1], sigma=0.5), small([1])]):
        together = model(ONE_SAMPLE.expand(2, -1))
    assert torch.equal(together[0], alone[0])
    assert together[1, 1].tolist() == [4, 5]


def test_records_and_batch_must_fit() -> None:
    model = Embedder()
    with pytest.raises(ValueError, match="1 records for a batch of 2"), replaying(model, [small([1])]):
        model(TWO_SAMPLES)
    assert model(torch.tensor([[5]])).tolist() == [[[10, 11]]], "a failed forward leaves no hook behind"


def test_a_narrow_record_beside_a_wide_one() -> None:
    """Row 2 alone is (4, 5), as the half of rows 1 and 3 is."""
    model = Embedder()
    narrow = dataclasses.replace(
        small([1]),
        ids=np.array([[2]], np.int32),
        weights=np.ones((1, 1), np.float32),
    )
    with replaying(model, [narrow, small([1])]):
        output = model(TWO_SAMPLES)
    assert output[:, 1].tolist() == [[4, 5], [4, 5]]
