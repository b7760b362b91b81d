"""Where in a text the final answer stands."""

from __future__ import annotations

import re

_THOUGHT_END = "</think>"
_BOXES = ("\\boxed", "\\fbox")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")
# "the answer is 12", "Answer: **12**", "#### 12" (GSM8K): the rest of the line, of the last such statement.
_STATEMENT = re.compile(r"(?:\banswer\b[^\n:=.]{0,40}?(?:\bis\b|:|=)|####)\s*:?\s*(?P<rest>[^\n]+)", re.IGNORECASE)


def visible(text: str) -> str:
    """The text after the thinking; all of it where the thinking never ends."""
    thought, end, rest = text.rpartition(_THOUGHT_END)
    return rest if end and rest.strip() else thought if end else text


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}``, braces balanced; ``\\boxed 3`` gives ``3``.

    Empty where the last one was cut off before its end: an earlier one is not what the text settles on.
    """
    start = max(text.rfind(box) for box in _BOXES)
    if start < 0:
        return None
    after = start + len(_BOXES[0] if text.startswith(_BOXES[0], start) else _BOXES[1])
    rest = text[after:]
    if not rest.lstrip(" ").startswith("{"):
        word = re.match(r" +([^\s$]+)", rest)
        return word[1] if word else ""
    depth = 0
    for place, character in enumerate(rest):
        # An escaped brace, as in \{1, 2\}, opens and closes nothing.
        if character in "{}" and rest[place - 1] != "\\":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return rest[:place].strip().removeprefix("{").strip()
    return ""


def stated(text: str) -> str | None:
    """What follows the last "answer is", "answer:" or "####", to the end of its line."""
    found = list(_STATEMENT.finditer(text))
    return found[-1]["rest"].strip() if found else None


def last_statement(text: str) -> str | None:
    """A canonical final answer where nothing is known of its kind: boxed, or stated, or the last number or line."""
    text = visible(text)
    found = last_boxed(text) or stated(text)
    numbers = _NUMBER.findall(found or text)
    if numbers:
        return f"{float(numbers[-1]):.15g}"
    lines = [line for line in (found or text).splitlines() if line.strip()]
    return " ".join(lines[-1].lower().strip(" .*").split()) if lines else None
