# SPDX-License-Identifier: Apache-2.0
"""Pictures in a prompt: their key for seeds, and their places in the prompts of trainer and engine."""

import hashlib
from collections.abc import Collection, Sequence


def key_of(images: object) -> bytes:
    """A key of a prompt's pictures, the same in every run, 16 bytes; empty without pictures.

    These are one or a list of paths, addresses, bytes or PIL images, as datasets and vLLM's ``multi_modal_data`` have.
    """
    listed = list(images) if isinstance(images, list | tuple) else [images]
    listed = [image for image in listed if image is not None]
    if not listed:
        return b""
    digest = hashlib.blake2b(digest_size=16)
    for image in listed:
        if isinstance(image, bytes):
            data = image
        elif hasattr(image, "tobytes") and hasattr(image, "size"):
            data = f"{getattr(image, 'mode', '')} {image.size} ".encode() + image.tobytes()
        else:
            data = str(image).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def unexpanded(prompt: list[int], placeholders: Collection[int]) -> list[int]:
    """A prompt for vLLM, which itself expands a picture's one placeholder into the picture's places."""
    from openrlhf.utils.vlm_utils import dedup_media_tokens

    return dedup_media_tokens(prompt, set(placeholders)) if placeholders else prompt


def check_places(of_trainer: Sequence[int], of_engine: Sequence[int]) -> None:
    """Raises RuntimeError if the trainer's processor and vLLM expanded a prompt's pictures into different tokens.

    Positions in a record are the expanded prompt's.
    """
    if list(of_trainer) == list(of_engine):
        return
    position: int | str = "the end"
    for place, (trainer_token, engine_token) in enumerate(zip(of_trainer, of_engine)):
        if trainer_token != engine_token:
            position = place
            break
    raise RuntimeError(
        f"a prompt with pictures has {len(of_trainer)} tokens for the trainer and {len(of_engine)} for vLLM, and they"
        f" differ from position {position} on: the records would be replayed at other positions. Use a model with"
        " pictures that OpenRLHF and vLLM expand alike, such as Qwen3-VL, or prompts without pictures."
    )
