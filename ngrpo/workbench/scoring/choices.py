# SPDX-License-Identifier: Apache-2.0
"""Multiple choice: which letter an answer settles on."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from ngrpo.workbench.scoring.answers import last_boxes, visible
from ngrpo.workbench.scoring.problem import Verdict

_MARKUP = re.compile(
    r"<\|[^|<>]*\|>|</?s>|[*_`${}]|\\[()\[\],;:! ]"
    r"|\\(?:text(?:bf|it|rm)?|math(?:rm|bf)|bf|rm)(?![A-Za-z])|^[ \t]*#+[ \t]",
    re.MULTILINE,
)
_DENIED = re.compile(r"(?:\bnot|n[’']t|\bnever|\bcannot)\s+(?:be\s+)?(?:option\s+|choice\s+)?\(?[A-Za-z]\)?(?![\w’'])")
# After these the answer stands: "the answer is", "Answer:", "I choose", "it must be", "wait, actually,".
_CUE = re.compile(
    r"\b(?:answer|option|choice)\b[^\n.:;,]{0,30}?(?:\bis\b|\bbe\b|:|=|\s-)"
    r"|\bans(?:wer)?\b[.:,]?|<answer>|####"
    r"|\b(?:choose|select|pick|take|go(?:ing)?\s+with)\b"
    r"|\b(?:it|that|this)(?:[’']s|\s+(?:is|must\s+be|has\s+to\s+be|should\s+be))"
    r"|\b(?:wait|actually|correction|sorry|on\s+second\s+thought|i\s+(?:mean|would\s+say)|no|so|hence|thus|therefore)\b",
    re.I,
)
_FILLER = re.compile(
    r"(?:[\s:,=\"-]|\b(?:definitely|clearly|simply|probably|likely|most|therefore|thus|actually|but|is|it|the|correct"
    r"|option|choice|letter|answer|no|i\s+(?:think|believe|guess|mean|would\s+say))\b)*",
    re.I,
)
_LETTER = re.compile(r"(?P<open>[\[(\"']?)(?P<letter>[A-Za-z])(?P<close>[\])\"']?)(?![\w’'])(?P<rest>[^\n]*)")
_ENDS = re.compile(
    r"\s*(?:$|[.,;:!?)<–—-]|\b(?:because|since|as|which|for|with|by|rather|instead)\b"
    r"|is\s+(?:the\s+)?(?:correct|right|best))"
)
_TEXT_ENDS = re.compile(
    r"\W*(?:\n|$)|[.;!<)](?:\s|$|/)|,?\s+(?:because|since|as|\(?(?:option\s+)?[A-Z]\b)"
    r"|\s+is\s+(?:the\s+)?(?:correct|right)"
)
_SEVERAL = re.compile(r"\s*(?:,|/|&|,?\s*\bor\b|,?\s*\band\b)\s*\(?[A-Za-z]\)?(?![\w’'])")
_NAMED = re.compile(
    r"(?<![\w’'])(?<![A-Za-z], )(?<!\bor )(?<!\band )\(?(?P<letter>[A-Z])\)?"
    r"\s+is\s+(?:(?:definitely|clearly|the|my)\s+)*(?:correct|right|best|(?:final\s+)?answer)\b"
)
_ALONE = re.compile(r"^\W*(?:(?:option|choice)\s+)?(?:\(([A-Za-z])\)|([A-Z]))\W*$", re.MULTILINE | re.I)
_LISTED = re.compile(r"^\W*([A-Z])\s*[.):]\s*\S|\(([A-Z])\)", re.MULTILINE)


def check(answer: str, text: str, options: Sequence[str] | None = None) -> Verdict:
    """Compares the letter that an answer settles on with the right one.

    Args:
        answer: the right letter.
        text: what the model said.
        options: the options' texts in order, where known: then only their letters count, and an option's text counts
            as its letter.

    Returns:
        The verdict; ``extracted`` is the letter.
    """
    letter = extract(text, options)
    return Verdict.of(letter is not None and letter == answer.strip().strip("().").upper(), letter)


def extract(text: str, options: Sequence[str] | None = None) -> str | None:
    """The letter of the last statement; a letter alone, or the only one in a list, where nothing is stated outright."""
    text = _DENIED.sub(" ", visible(text))
    names: dict[str, str] = {
        _plain(option).lower(): letter for option, letter in zip(options or (), string.ascii_uppercase)
    }
    boxes = last_boxes(text)
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox")) if boxes else 0
    found: list[str] = _claims(text[box:], names)
    if boxes and not found:
        found = _claims(text[:box], names)
        claim = _claim(_plain(", ".join(dict.fromkeys(boxes))), names) if all(boxes) else ""
        found += [] if claim is None else [claim]
    if not found:
        plain = _plain(text)
        alone = {(one or other).upper() for one, other in _ALONE.findall(plain)}
        listed = alone or {one or other for one, other in _LISTED.findall(plain)}
        found = [listed.pop() if len(listed) == 1 else names.get(plain.strip(" .\n").lower(), "")]
    return found[-1] if found[-1] in (names.values() if names else [*string.ascii_uppercase]) else None


def _plain(text: str) -> str:
    return _MARKUP.sub("", text)


def _claims(text: str, names: dict[str, str]) -> list[str]:
    """The letters that are stated, in order; an empty one where several are stated at once."""
    plain = _plain(text)
    found = [(match.start(), match["letter"]) for match in _NAMED.finditer(plain)]
    for cue in _CUE.finditer(plain):
        claim = _claim(plain[cue.end() :], names)
        if claim is not None:
            found.append((cue.end(), claim))
    return [claim for _, claim in sorted(found)]


def _claim(text: str, names: dict[str, str]) -> str | None:
    """The letter that a text begins with, or whose option's text it begins with; empty for several, else None."""
    text = _FILLER.sub("", text, count=1).strip()
    for name, letter in names.items():
        rest = text[len(name) :]
        if name and text.lower().startswith(name) and _TEXT_ENDS.match(rest):
            return letter
    found = _LETTER.match(text)
    if not found:
        return None
    letter, rest = found["letter"].upper(), found["rest"]
    if _SEVERAL.match(rest):
        return ""
    its_text = any(
        name and rest.strip(" .):").lower().startswith(name) for name, each in names.items() if each == letter
    )
    if _ENDS.match(rest) or its_text or (found["close"] and not re.match(r"\s*is\b", rest)):
        return letter
    return None
