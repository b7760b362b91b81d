# SPDX-License-Identifier: Apache-2.0
"""Pictures in a prompt: what the engine is given, where they stand, and what tells them apart."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence


def identity(pictures: object) -> bytes:
    """What tells the pictures of a prompt from those of another, in every run alike.

    Args:
        pictures: as a dataset or vLLM's ``multi_modal_data`` has them: paths, addresses, bytes or PIL images; one of
            them, a list, or None.

    Returns:
        Empty where there is none, else 16 bytes.
    """
    each = list(pictures) if isinstance(pictures, list | tuple) else [pictures]
    each = [picture for picture in each if picture is not None]
    if not each:
        return b""
    digest = hashlib.blake2b(digest_size=16)
    for picture in each:
        data = _data(picture)
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def _data(picture: object) -> bytes:
    if isinstance(picture, bytes):
        return picture
    if hasattr(picture, "tobytes") and hasattr(picture, "size"):
        return f"{getattr(picture, 'mode', '')} {picture.size} ".encode() + picture.tobytes()
    return str(picture).encode()


def unexpanded(prompt: list[int], placeholders: Collection[int]) -> list[int]:
    """As vLLM takes a prompt: it makes a picture's one placeholder into as many as the picture has places.

    Args:
        prompt: token ids, in which a picture has all of its places.
        placeholders: the tokens that stand at these places.
    """
    from openrlhf.utils.vlm_utils import dedup_media_tokens

    return dedup_media_tokens(prompt, set(placeholders)) if placeholders else prompt


def check_places(trainer: Sequence[int], engine: Sequence[int]) -> None:
    """Positions in a record are those of the expanded prompt, which must be the same on both sides.

    Args:
        trainer: the prompt's tokens as the trainer's processor expanded them.
        engine: as vLLM did.

    Raises:
        RuntimeError: where vLLM gives a picture other places than the trainer's processor.
    """
    if list(trainer) != list(engine):
        first = next((i for i, pair in enumerate(zip(trainer, engine)) if pair[0] != pair[1]), "the end")
        raise RuntimeError(
            f"a prompt with pictures has {len(trainer)} tokens for the trainer and {len(engine)} for vLLM, and they"
            f" differ from position {first} on: the records would be replayed at other positions. Use a model whose"
            " pictures OpenRLHF and vLLM expand alike, such as Qwen3-VL, or prompts without pictures."
        )
