# SPDX-License-Identifier: Apache-2.0
"""Records beside pictures: a replayed row lands where the expanded prompt has it, and pictures keep their places."""

from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.trainers.openrlhf.model_actors import merge_mm_train_inputs as override_merge
from ngrpo.trainers.openrlhf.pictures import key_of as pictures_key
from perturbations import replaying
from perturbations.replay import ReplayRecord
from perturbations.replay.trajectory import FinishedTrajectory
from tests.support.replaced_rows import replace_rows

# Ids of the tokens around a picture: its first, one for each of its places, its last; and a video's.
START = 90
PAD = 91
END = 92
VIDEO = 93
PROMPT = [5, 6, START, PAD, PAD, PAD, PAD, END, 7, 8]
ANSWER = [11, 12, 13, 14, 15]
# The position that is replayed, behind the picture, and the token that it was fed.
ROW = len(PROMPT) + 1
OTHER = 40
# A picture has 4 × 4 patches, and a patch has 2 frames of 4 × 4 pixels in 3 colors.
GRID = (1, 4, 4)
PATCHES = 16
VALUES_OF_PATCH = 3 * 2 * 4 * 4


@pytest.fixture(scope="module")
def actor() -> Any:
    """OpenRLHF's own actor around a tiny Qwen3-VL."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    from ngrpo.machine.hardware.stand_ins import flash_attn_stand_in

    pytest.importorskip("openrlhf")
    with flash_attn_stand_in():
        from openrlhf.models import actor as module
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 100,
        "rope_parameters": rope,
        "initializer_range": 0.2,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "depth": 1,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=PAD,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    model = Qwen3VLForConditionalGeneration(config).eval()
    actor = module.Actor(model)
    actor.is_vlm = True
    actor._vlm_config = model.config
    actor.packing_samples = False
    actor.temperature = 1.0
    return actor


def record(fed: dict[int, int], length: int) -> ReplayRecord:
    """The record of a text in which other tokens were fed, by their position."""
    ids = np.array(list(fed.values()), np.int32)
    return ReplayRecord(
        seed=5,
        prompt_tokens=1,
        num_tokens=length,
        positions=np.array(list(fed), np.int32),
        ids=ids.reshape(-1, 1),
        weights=np.ones((len(fed), 1), np.float32),
        sigma=None,
        agreed=np.ones(len(fed), dtype=bool),
    )


def log_probs(actor: Any, texts: list[list[int]], fed: list[dict[int, int]]) -> torch.Tensor:
    """log π of all tokens but the first, (B, T - 1): by the merge of side inputs, OpenRLHF's forward and the replay.

    Args:
        actor: of OpenRLHF.
        texts: of one length; a text with PAD gets a picture of its own.
        fed: for each text the other tokens that it was fed, by their position.
    """
    from openrlhf.utils.vlm_utils import merge_mm_train_inputs

    records = [record(of_text, len(text)) for of_text, text in zip(fed, texts)]
    generator = torch.Generator().manual_seed(0)
    entries = []
    for text, of_text in zip(texts, records):
        trajectory = FinishedTrajectory(of_text, np.zeros(len(text), np.float32))
        entry: dict[str, Any] = trajectory.pack()
        if PAD in text:
            entry["pixel_values"] = torch.randn(PATCHES, VALUES_OF_PATCH, generator=generator)
            entry["image_grid_thw"] = torch.tensor([GRID])
        entries.append(entry)
    sequences = torch.tensor(texts)
    mask = torch.ones_like(sequences)
    merge = override_merge(merge_mm_train_inputs)
    side_inputs = merge(entries, "cpu")
    pictures = sum(PAD in text for text in texts)
    assert len(side_inputs["pixel_values"]) == PATCHES * pictures
    with torch.no_grad(), replaying(actor.model, records, attention_mask=mask):
        return actor(sequences, mask[:, 1:], mask, **side_inputs)


def test_a_row_behind_a_picture_is_replayed_where_the_expanded_prompt_has_it(actor: Any) -> None:
    """The batch has two further samples, one of text alone and one with a picture of its own: they stay as they are."""
    text = PROMPT + ANSWER
    text_with_other = text.copy()
    text_with_other[ROW] = OTHER
    text_alone = text.copy()
    for position, token in enumerate(text):
        if token >= START:
            text_alone[position] = 20 + token % 9
    plain = log_probs(actor, [text, text_alone, text], [{}, {}, {}])
    as_text = log_probs(actor, [text_with_other, text_alone, text], [{}, {}, {}])
    replayed = log_probs(actor, [text, text_alone, text], [{ROW: OTHER}, {}, {}])

    # Entry ROW - 1 is left out: there, log π is of the row's own token, which is not the same in the two texts. What
    # the model computed at the row and behind it depends on the input at the row, which is.
    torch.testing.assert_close(replayed[0, ROW:], as_text[0, ROW:], rtol=0.0, atol=2e-6)
    effect = replayed[0, ROW:] - plain[0, ROW:]
    assert effect.abs().max() > 0.1
    torch.testing.assert_close(replayed[0, :ROW], plain[0, :ROW], rtol=0.0, atol=2e-6)
    torch.testing.assert_close(replayed[1:], plain[1:], rtol=0.0, atol=2e-6)


def test_a_picture_keeps_its_places(actor: Any) -> None:
    """The picture overwrites what a record has at one of its places, as it does in the engine."""
    text = PROMPT + ANSWER
    plain = log_probs(actor, [text], [{}])
    place = PROMPT.index(PAD)
    replayed = log_probs(actor, [text], [{place: OTHER}])
    torch.testing.assert_close(replayed, plain, rtol=0.0, atol=0.0)


def test_a_picture_keeps_its_places_in_the_engine() -> None:
    """vLLM writes a picture over the rows that its embedding returned, with an override or without."""
    pytest.importorskip("vllm")
    from torch import nn
    from vllm.model_executor.models.utils import _merge_multimodal_embeddings

    from ngrpo.rollout.input_override import InputOverride

    embedding = nn.Embedding(100, 8)
    override = InputOverride(embedding, 32, 2, 8, torch.float32, torch.device("cpu"))
    ids = torch.tensor(PROMPT + ANSWER)
    override_vectors = torch.full((2, 8), 3.0)
    picture_vectors = torch.full((4, 8), 7.0)
    replace_rows(override, [PROMPT.index(PAD), ROW], override_vectors)
    in_picture = ids == PAD
    with torch.no_grad():
        merged = _merge_multimodal_embeddings(embedding(ids), picture_vectors, in_picture)
        plain = nn.functional.embedding(ids, embedding.weight)
    assert (merged[in_picture] == 7.0).all()
    assert (merged[ROW] == 3.0).all()
    untouched = ~in_picture
    untouched[ROW] = False
    assert torch.equal(merged[untouched], plain[untouched])


def test_other_pictures_are_told_apart() -> None:
    """The key, of which a trajectory's seed is made, depends on what pictures show: it is the same in every run."""
    image = pytest.importorskip("PIL.Image")
    red = image.new("RGB", (2, 2), "red")
    blue = image.new("RGB", (2, 2), "blue")
    gray = image.new("L", (2, 2))
    assert pictures_key(None) == pictures_key([]) == b""
    assert pictures_key([red]) == pictures_key(image.new("RGB", (2, 2), "red"))

    different = [
        [red],
        [blue],
        [red, blue],
        [blue, red],
        [gray],
        ["a.png"],
        ["b.png"],
        [b"a.png", b""],
    ]
    keys = {pictures_key(pictures) for pictures in different}
    assert len(keys) == len(different)
