# SPDX-License-Identifier: Apache-2.0
"""Multiple choice: which letter an answer settles on."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from ngrpo.scoring.answers import last_boxed, visible
from ngrpo.scoring.problem import Verdict

_OPEN, _CLOSE = r"[\s*_`\"'(\[{$]*", r"(?![\w'’])"
_WORDS = r"(?:\b(?:final\s+|correct\s+|best\s+|right\s+)?(?:answer|option|choice)\b)"
# "Answer: B", "the correct option is (C)", "answer is option **D**", "choose B".
_STATED = re.compile(
    rf"(?:{_WORDS}(?:\s+(?:letter|here|to\s+\w+\s+\w+))?[*_`]*\s*(?:\bis\b|\bwould\s+be\b|\bmust\s+be\b|:|=)"
    rf"|\b(?:choose|select|pick|going\s+with|go\s+with)\b)"
    rf"[\s:*_]*(?i:(?:the\s+)?(?:option|choice|answer|letter)\b)?[\s:*_]*(?:\\boxed)?(?:\{{\\text)?"
    rf"{_OPEN}(?P<letter>[A-Z]){_CLOSE}",
)
_NAMED = re.compile(rf"\b(?i:option|choice)\s+{_OPEN}(?P<letter>[A-Z]){_CLOSE}\S*\s+(?i:is\s+(?:the\s+)?correct)")
_BRACKETED = re.compile(r"\((?P<letter>[A-Z])\)|\[(?P<letter2>[A-Z])\]")
_ALONE = re.compile(r"^[\s*_`#>-]*(?P<letter>[A-Z])[.):]?(?=[\s*_`]*$|[.):]\s)", re.MULTILINE)
_BOX_NOISE = re.compile(r"\\(?:text|textbf|mathrm|mathbf|rm|bf)\b|[\s{}()\[\]$.*:]")
_UPPER_WORDS = re.compile(r"\b(?:Answer|ANSWER|Option|OPTION|Choice|CHOICE|Is|IS|Final|FINAL|Correct|CORRECT)\b")


def check(answer: str, text: str, options: Sequence[str] | None = None) -> Verdict:
    """Compares the letter that an answer settles on with the right one.

    Args:
        answer: the right letter.
        text: what the model said.
        options: the options' texts in order, where known: then only their letters count, and a boxed option in full
            counts as its letter.

    Returns:
        The verdict; ``extracted`` is the letter.
    """
    letter = extract(text, options)
    correct = letter is not None and letter == answer.strip().strip("().").upper()
    return Verdict(float(correct), correct, letter, letter is not None)


def extract(text: str, options: Sequence[str] | None = None) -> str | None:
    """The letter of the last statement; "(D)" and a letter alone count where nothing is stated outright."""
    letters = string.ascii_uppercase[: len(options)] if options else string.ascii_uppercase
    text = visible(text)
    plain = _UPPER_WORDS.sub(lambda match: match[0].lower(), text)
    stated = [m for pattern in (_STATED, _NAMED) for m in pattern.finditer(plain) if m["letter"] in letters]
    boxed = _boxed(text, letters, options)
    # Both are outright statements: the later one wins.
    box_at = max(text.rfind("\\boxed"), text.rfind("\\fbox")) if boxed else -1
    last = max(stated, key=lambda m: m.start("letter"), default=None)
    if last is not None and last.start("letter") > box_at:
        return last["letter"]
    if boxed:
        return boxed
    weak = [
        (m.end(), letter)
        for pattern in (_BRACKETED, _ALONE)
        for m in pattern.finditer(plain)
        if (letter := next(group for group in m.groups() if group)) in letters
    ]
    return max(weak)[1] if weak else None


def _boxed(text: str, letters: str, options: Sequence[str] | None) -> str | None:
    content = last_boxed(text)
    if content is None:
        return None
    if options and content.strip() in [option.strip() for option in options]:
        return letters[[option.strip() for option in options].index(content.strip())]
    bare = _BOX_NOISE.sub("", content)
    if len(bare) == 1 and bare.upper() in letters:
        return bare.upper()
    lead = re.match(r"(?:\\text\{)?\(?([A-Z])[).:]", content.strip())
    return lead[1] if lead and lead[1] in letters else None
