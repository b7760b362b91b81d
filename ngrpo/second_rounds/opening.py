# SPDX-License-Identifier: Apache-2.0
"""Where the text of a prompt begins, behind what its chat template puts in front of it."""

from __future__ import annotations

from typing import Any

_TEXT = "ngrpo-text"


def opening(prompt: str, tokenizer: Any) -> int:
    """The place at which the first message's own text begins.

    Args:
        prompt: as the model reads it, made by the tokenizer's chat template or not.
        tokenizer: of transformers.

    Returns:
        Behind the head of the first message: the system's where the data has one, else the user's. 0 where the prompt
        was not made by the template, or there is none.
    """
    if not getattr(tokenizer, "chat_template", None):
        return 0
    user = {"role": "user", "content": _TEXT}
    # A template may put a system message of its own in front of the user's: that is its longer head, and no text.
    heads = [_head([user], tokenizer), _head([{"role": "system", "content": _TEXT}, user], tokenizer)]
    return max((len(head) for head in heads if head is not None and prompt.startswith(head)), default=0)


def _head(messages: list[dict[str, str]], tokenizer: Any) -> str | None:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception:  # a template raises Jinja's own errors for roles that it does not know
        return None
    return text.partition(_TEXT)[0] if _TEXT in text else None
