# SPDX-License-Identifier: Apache-2.0
"""Records beside pictures: a replayed row lands where the expanded prompt has it, and pictures keep their places."""

from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.trainers.openrlhf.model_actors import merge_mm_train_inputs as ours
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
# A picture of 16 patches: 3 colors, 2 frames, 4 × 4 pixels each.
PIXELS = 3 * 2 * 4 * 4
GRID = (1, 4, 4)


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
    """A record of tokens by the position that they were fed at."""
    return ReplayRecord(
        seed=5,
        prompt_tokens=1,
        num_tokens=length,
        positions=np.array(list(fed), np.int32),
        ids=np.array(list(fed.values()), np.int32).reshape(-1, 1),
        weights=np.ones((len(fed), 1), np.float32),
        sigma=None,
        agreed=np.ones(len(fed), dtype=bool),
    )


def log_probs(actor: Any, texts: list[list[int]], fed: list[dict[int, int]]) -> torch.Tensor:
    """Of all tokens but the first, (B, T - 1): by the merge of side inputs, OpenRLHF's forward and the replay."""
    from openrlhf.utils.vlm_utils import merge_mm_train_inputs

    records = [record(of_text, len(text)) for of_text, text in zip(fed, texts)]
    draws = torch.Generator().manual_seed(0)
    entries = []
    for text, kept in zip(texts, records):
        packed: dict[str, Any] = FinishedTrajectory(kept, np.zeros(len(text), np.float32)).pack()
        if PAD in text:
            pixels = torch.randn(16, PIXELS, generator=draws)
            packed |= {"pixel_values": pixels, "image_grid_thw": torch.tensor([GRID])}
        entries.append(packed)
    sequences = torch.tensor(texts)
    mask = torch.ones_like(sequences)
    side_inputs = ours(merge_mm_train_inputs)(entries, "cpu")
    assert len(side_inputs["pixel_values"]) == 16 * sum(PAD in text for text in texts)
    with torch.no_grad(), replaying(actor.model, records, attention_mask=mask):
        return actor(sequences, mask[:, 1:], mask, **side_inputs)


def test_a_row_behind_a_picture_is_replayed_where_the_expanded_prompt_has_it(actor: Any) -> None:
    """Beside a sample with a picture of its own and one of text alone, which stay as they are."""
    text = PROMPT + ANSWER
    replaced = [*text[:ROW], OTHER, *text[ROW + 1 :]]
    words = [20 + token % 9 if token >= START else token for token in text]
    plain = log_probs(actor, [text, words, text], [{}, {}, {}])
    as_text = log_probs(actor, [replaced, words, text], [{}, {}, {}])
    replayed = log_probs(actor, [text, words, text], [{ROW: OTHER}, {}, {}])
    # A row's own log-probability is that of another token in the two texts; all behind it see the replayed row alone.
    torch.testing.assert_close(replayed[0, ROW:], as_text[0, ROW:], rtol=0.0, atol=2e-6)
    assert (replayed[0, ROW:] - plain[0, ROW:]).abs().max() > 0.1
    torch.testing.assert_close(replayed[0, :ROW], plain[0, :ROW], rtol=0.0, atol=2e-6)
    torch.testing.assert_close(replayed[1:], plain[1:], rtol=0.0, atol=2e-6)


def test_a_picture_keeps_its_places(actor: Any) -> None:
    """What stands in a record at a picture's place is overwritten by the picture, as in the engine."""
    text = PROMPT + ANSWER
    plain = log_probs(actor, [text], [{}])
    place = PROMPT.index(PAD)
    torch.testing.assert_close(log_probs(actor, [text], [{place: OTHER}]), plain, rtol=0.0, atol=0.0)


def test_a_picture_keeps_its_places_in_the_engine() -> None:
    """vLLM puts pictures into the rows that its embedding gave, an override or not."""
    pytest.importorskip("vllm")
    from torch import nn
    from vllm.model_executor.models.utils import _merge_multimodal_embeddings

    from ngrpo.rollout.input_override import InputOverride

    embedding = nn.Embedding(100, 8)
    override = InputOverride(embedding, 32, 2, 8, torch.float32, torch.device("cpu"))
    ids = torch.tensor(PROMPT + ANSWER)
    vectors = torch.full((2, 8), 3.0)
    pictures = torch.full((4, 8), 7.0)
    replace_rows(override, [PROMPT.index(PAD), ROW], vectors)
    with torch.no_grad():
        merged = _merge_multimodal_embeddings(embedding(ids), pictures, ids == PAD)
        own = nn.functional.embedding(ids, embedding.weight)
    assert (merged[ids == PAD] == 7.0).all() and (merged[ROW] == 3.0).all()
    rest = (ids != PAD) & (torch.arange(len(ids)) != ROW)
    assert torch.equal(merged[rest], own[rest])


def test_other_pictures_are_told_apart() -> None:
    """By what they show, wherever they lie in memory: as seeds of trajectories, in each run alike."""
    image = pytest.importorskip("PIL.Image")
    red, blue = (image.new("RGB", (2, 2), color) for color in ("red", "blue"))
    assert pictures_key(None) == pictures_key([]) == b""
    assert pictures_key([red]) == pictures_key(image.new("RGB", (2, 2), "red"))
    gray = image.new("L", (2, 2))
    different = [[red], [blue], [red, blue], [blue, red], [gray], ["a.png"], ["b.png"], [b"a.png", b""]]
    assert len({pictures_key(pictures) for pictures in different}) == len(different)
