# SPDX-License-Identifier: Apache-2.0
"""Environments of the package ``verifiers``, run in a process of their own: `tasks.verifiers` is the task.

``process`` is the side that asks, ``worker`` the program that answers; ``classic`` and ``tasksets`` are the package's
two ways to write an environment (0.2 and 0.3; 0.3 and 0.4).
"""

from __future__ import annotations

from typing import NamedTuple

Message = dict[str, str]


class Row(NamedTuple):
    """One problem of an environment.

    Attributes:
        messages: the chat that the model is asked: dictionaries with ``role`` and ``content``.
        data: what the environment scores an answer by; JSON values only.
    """

    messages: list[Message]
    data: dict[str, object]


class Scored(NamedTuple):
    """What a rubric says of one answer.

    Attributes:
        reward: the weighted sum of its functions.
        metrics: each function by its name, without its weight.
        failed: what the first function that raised an error said; None where none did. The package counts such a
            function as 0.
    """

    reward: float
    metrics: dict[str, float]
    failed: str | None = None


class Unfit(Exception):
    """The environment cannot be a task here; the message says why."""


def text_messages(prompt: object) -> list[Message]:
    """A prompt as a chat of texts.

    Args:
        prompt: a text, or messages as dictionaries; keys beside ``role`` and ``content`` may stand there empty.

    Raises:
        Unfit: where a message holds something else, such as a picture or the call of a tool.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise Unfit("a problem has no prompt; environments whose user opens the conversation are not served")
    messages = []
    for message in prompt:
        content = message.get("content")
        if isinstance(content, list) and all(part.get("type") == "text" for part in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str) or message.get("tool_calls"):
            raise Unfit("a prompt holds pictures or calls of tools; prompts of text alone are served")
        messages.append({"role": message["role"], "content": content})
    return messages
