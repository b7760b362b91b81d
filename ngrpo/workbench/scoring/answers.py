# SPDX-License-Identifier: Apache-2.0
"""Reading a model's answer: what was generated, what stands after the thinking, boxes, statements and numbers.

The one reader of answers, below tasks, evaluation and trainer alike.
"""

from __future__ import annotations

import re
from decimal import Decimal

_THOUGHT = re.compile(r"<(think|thinking)>.*?</\1>", re.DOTALL)
_THOUGHT_BEGINS, _THOUGHT_ENDS = re.compile(r"<think(?:ing)?>"), re.compile(r"</think(?:ing)?>")
_BOX = re.compile(r"\\(?:boxed|fbox)")
_BETWEEN_BOXES = re.compile(r"(?:[\s$,]|\\[()]|\band\b|\bor\b|\\text\{\s*(?:and|or)\s*\})*")
_ASSISTANT = "assistant\n"
# 1,234.50 and 12 are numbers; the 3 of x3 is not. The minus of 8-5 is not a sign.
_NUMBER = re.compile(r"(?:(?<![\w)\].])-)?(?<![\w.])(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
# "the answer is 12", "Answer: **12**", "#### 12" (GSM8K): the rest of the line, of the last such statement.
_STATEMENT = re.compile(r"(?:\banswer\b[^\n:=.]{0,40}?(?:\bis\b|:|=)|####)\s*:?\s*(?P<rest>[^\n]+)", re.IGNORECASE)


def generated(query: str, prompt: str) -> str:
    """The generated part of a decoded sequence, special tokens and all, after a ``<think>`` that ends its prompt.

    Where the prompt was cut or decodes differently, the text after the last turn's opening is taken.
    """
    text = query[len(prompt) :] if query.startswith(prompt) else query.rpartition(_ASSISTANT)[2]
    return f"<think>{text}" if prompt.rstrip().endswith("<think>") else text


def visible(text: str) -> str:
    """The text without its thinking. A thinking that was not closed reaches to the end."""
    text = _THOUGHT_ENDS.split(_THOUGHT.sub("", text))[-1]  # a template may have opened the thinking
    return _THOUGHT_BEGINS.split(text)[0]


def last_boxes(text: str) -> list[str]:
    """The contents of the last ``\\boxed{...}`` and of those joined to it by a comma, "and" or "or".

    Braces are balanced; ``\\boxed 3`` gives ``3``. Where the last box was cut off before its end, its content is empty:
    an earlier one is not what the text settles on. No boxes give no contents.
    """
    contents: list[str] = []
    begin = len(text)
    for box in reversed(list(_BOX.finditer(text))):
        content, end = _content(text, box.end())
        if contents and not _BETWEEN_BOXES.fullmatch(text[end:begin]):
            break
        contents.insert(0, content)
        begin = box.start()
    return contents


def last_boxed(text: str) -> str | None:
    """The last of :func:`last_boxes`; None where there is none."""
    contents = last_boxes(text)
    return contents[-1] if contents else None


def _content(text: str, start: int) -> tuple[str, int]:
    """What a box holds, and where it ends."""
    rest = text[start:]
    if not rest.lstrip(" ").startswith("{"):
        word = re.match(r" +([^\s$]+)", rest)
        return (word[1], start + word.end()) if word else ("", start)
    depth = 0
    for index, character in enumerate(rest):
        # An escaped brace, as in \{1, 2\}, opens and closes nothing.
        if character in "{}" and rest[index - 1] != "\\":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return rest[:index].strip().removeprefix("{").strip(), start + index + 1
    return "", len(text)


def stated(text: str) -> str | None:
    """What follows the last "answer is", "answer:" or "####", to the end of its line."""
    matches = list(_STATEMENT.finditer(text))
    return matches[-1]["rest"].strip() if matches else None


def numbers(text: str, *, alone: bool = False) -> list[str]:
    """The numbers in a text, each in one form: ``1,200.50`` is ``1200.5``, and ``-0`` is ``0``.

    Args:
        text: any text.
        alone: leave out numbers with a letter right after them, such as those of ``2x`` and ``3rd``.
    """
    texts = [m[0] for m in _NUMBER.finditer(text) if not (alone and re.match(r"\w", text[m.end() :]))]
    values = (Decimal(number.replace(",", "")) + 0 for number in texts)  # + 0: there is no -0
    return [format(value.normalize(), "f") for value in values]


def last_number(text: str) -> str | None:
    """The last number in a text, in one form; None where there is none."""
    all_numbers = numbers(text)
    return all_numbers[-1] if all_numbers else None


def last_statement(text: str) -> str | None:
    """A canonical final answer where nothing is known of its kind: boxed, or stated, or the last number or line."""
    text = visible(text)
    said = last_boxed(text) or stated(text) or text
    lines = [line for line in said.splitlines() if line.strip()]
    return last_number(said) or (" ".join(lines[-1].lower().strip(" .*").split()) if lines else None)


def outcome(text: str) -> str:
    """What an answer comes to, so that two ways to the same answer are one outcome.

    The content of the last box, else the last number, else the whole text in lower case with single spaces. Unlike
    :func:`last_statement` it keeps all of a box, such as a fraction.
    """
    text = visible(text)
    boxed = "".join((last_boxed(text) or "").split())
    return boxed or last_number(text) or " ".join(text.lower().split())
