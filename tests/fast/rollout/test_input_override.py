# SPDX-License-Identifier: Apache-2.0
"""The embedding's override by hand: which rows of a forward are replaced, by what, and until when."""

import numpy as np
import torch
from torch import Tensor, nn

from ngrpo.rollout.input_override import PLAIN, InputOverride

# Token i has the row (i, i). The drawn vectors of a step of two rows are 10 and 11, stored ones of row i 20 + i.
ROWS = torch.arange(4.0).unsqueeze(1).repeat(1, 2)
DRAWN = torch.tensor([[10.0, 10.0], [11.0, 11.0]])
FORWARD = torch.tensor([0, 1, 2, 3])


def overridden() -> tuple[nn.Module, InputOverride]:
    embedding = nn.Embedding(4, 2, _weight=ROWS.clone()).requires_grad_(False)
    return embedding, InputOverride(embedding, 4, 2, 2, torch.float32, torch.device("cpu"))


def lay_out(override: InputOverride, *sources: int) -> None:
    override.lay_out(np.array(sources, dtype=np.int32), torch.from_numpy)


def put_drawn(override: InputOverride, *rows: int) -> None:
    at = torch.tensor(rows)
    override.put_drawn(at, DRAWN[at], torch.ones(len(rows), dtype=torch.bool))


def fed(embedding: nn.Module, tokens: Tensor = FORWARD) -> list[float]:
    return embedding(tokens)[:, 0].tolist()


def test_edits_of_a_step_are_fed_at_the_next_one_alone() -> None:
    embedding, override = overridden()
    lay_out(override, 0, 1)
    put_drawn(override, 0, 1)
    assert fed(embedding) == [10.0, 11.0, 2.0, 3.0]
    put_drawn(override, 1)
    assert fed(embedding) == [0.0, 11.0, 2.0, 3.0], "row 0 of this step has no edit"
    override.clear_drawn()
    assert fed(embedding) == [0.0, 1.0, 2.0, 3.0]


def test_sources_stay_until_they_are_laid_out_anew() -> None:
    embedding, override = overridden()
    put_drawn(override, 0, 1)
    lay_out(override, PLAIN, 0, PLAIN, 1)
    assert fed(embedding) == fed(embedding) == [0.0, 10.0, 2.0, 11.0]
    lay_out(override, 1, PLAIN)
    assert fed(embedding) == [11.0, 1.0, 2.0, 3.0], "the longer forward's rows are the model's own again"
    lay_out(override, PLAIN, PLAIN)
    assert fed(embedding) == [0.0, 1.0, 2.0, 3.0]


def test_stored_edits_are_fed_beside_drawn_ones() -> None:
    embedding, override = overridden()
    put_drawn(override, 0, 1)
    rows = np.array([0, 3])
    override.place_stored(torch.from_numpy(rows), torch.tensor([[20.0, 20.0], [23.0, 23.0]]))
    first, last = override.sources_of_stored(rows).tolist()
    lay_out(override, first, 1, PLAIN, last)
    assert fed(embedding) == [20.0, 11.0, 2.0, 23.0]
    override.clear_drawn()
    assert fed(embedding) == [20.0, 1.0, 2.0, 23.0]


def test_an_encoder_within_looks_up_the_models_rows() -> None:
    embedding, override = overridden()
    put_drawn(override, 0, 1)
    lay_out(override, 1, 0)
    with override.suspended():
        assert fed(embedding) == [0.0, 1.0, 2.0, 3.0]
    assert fed(embedding) == [11.0, 10.0, 2.0, 3.0]
