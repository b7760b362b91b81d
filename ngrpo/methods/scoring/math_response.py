# SPDX-License-Identifier: Apache-2.0
"""The final answer of a response as LaTeX that math-verify reads."""

import re
from collections.abc import Sequence
from decimal import Decimal
from itertools import pairwise

from ngrpo.machine.storage.datafiles import decimal_text
from ngrpo.methods.scoring.answers import RESULT_MARK, SUPPOSED, last_boxes, values_and_about, visible

# Of a long text the end is searched: the answer is there, and math-verify's search grows faster than the length.
_TAIL = 4000
_LONGEST = 120
# The ** of x**2 + y**2 are powers: marks of bold text follow no letter, digit or bracket.
_MARKUP = re.compile(
    r"^[ \t]*```\w*[ \t]*$\n?|<\|[^|<>]*\|>|</?s>|^[ \t]*#{1,3}[ \t]"
    r"|(?<![A-Za-z0-9)\]}])(?P<mark>\*\*|__|`)(?=\S)(?P<inside>.*?\S)(?P=mark)",
    re.MULTILINE,
)
# A formula on lines of its own.
_DISPLAY = re.compile(r"^[ \t]*(\\\[|\$\$)[ \t]*\n\s*([^\n]*\S)[ \t]*\n[ \t]*(\\\]|\$\$)", re.MULTILINE)
_NUMBER = r"(?:\$[^$\n]+\$|\\boxed\{[^{}]*\}|\\\(.+?\\\)|[€£$]?[-+]?\d(?:[\d.,/]*\d)?)"
_DENIED = re.compile(
    rf"(?:\bnot|n[’']t|\bnever|\bcannot)(?:\s+(?:be|equal|equal to))?\s+{_NUMBER}"
    rf"|{_NUMBER}\s+(?:is\s+not|isn[’']t|cannot\s+be)\s+(?:the\s+)?(?:\w+\s+)?answer\b"
)
_CORRECTION = re.compile(r"\b(?:wait|actually|correction|scratch that|sorry|on second thought|i mean|i meant)\b", re.I)
# After "Wait": "it is 6", "that's incorrect. It should be 6", "I made a mistake. The correct value is 6".
_CORRECTED = re.compile(
    r"\W*(?:(?:(?:it|that|this)(?:\s+is|[’']s)\s+(?:not\s+(?:right|correct)|wrong|incorrect)"
    r"|i\s+made\s+an?\s+(?:mistake|error))[.,;!]\s*)?"
    r"(?:(?:it|that|this|the\s+(?:correct|right)\s+(?:value|result))(?:\s+(?:is|should be|must be)|[’']s)\s+)?"
    rf"(?P<rest>{_NUMBER})[.!]?\s*",
    re.I,
)
_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL)
# "the answer is 12", "Answer: 12", "#### 12" (GSM8K), and a line "Answer" with the answer below it.
_STATED = re.compile(
    rf"(?:\banswers?\b[^\n:=.]{{0,40}}?(?:\bis\b|\bare\b|\bbe\b|:|=)|{RESULT_MARK})[\s:]*(?=(?P<rest>[^\n]+))"
    r"|^\W*(?:the\s+)?(?:final\s+)?answer\W*\n\s*(?P<below>[^\n]+)",
    re.I | re.MULTILINE,
)
# A bound is no value: "at least 5", "5 or more", "between 5 and 7".
_BOUND = re.compile(
    r"\b(?:at (?:most|least)|(?:greater|less|more|fewer|larger|smaller) than|between|or (?:more|less|fewer|greater))\b"
)
# "It might be 12, or it could also be 15" leaves open which.
_MAYBE = r"\b(?:(?:might|may|could)\s+(?:(?:also|well|even)\s+)?be|maybe|perhaps|possibly)"
_OPEN = re.compile(rf"{_MAYBE}\s+(?:either\s+)?(?P<first>{_NUMBER})(?:,?\s+or\s+(?P<second>{_NUMBER}))?", re.I)
_QUESTION = re.compile(r"(?:[^.!?\n]|\.(?=\d))*\?(?=\s|$)")
_MATH = re.compile(r"\$\$?(?!\s)(?P<a>[^$\n]+?)(?<!\s)\$\$?|\\\((?P<b>.+?)\\\)|\\\[(?P<c>.+?)\\\]", re.DOTALL)
_SENTENCE_ENDS = re.compile(
    r"[.!?](?=\s|$)|;|\s\(|\s[–—-]\s(?=[a-z])|,\s(?!(?:and|or)\b)(?=[a-z]{2})"
    r"|,?\s(?:because|since|which|where|when|so|for|if|as|from|by|in total|altogether)\b"
)
_LEADING = re.compile(
    r"(?:(?:that|but|just|simply|exactly|approximately|about|only|either|both|therefore|thus|equals?|to"
    r"|(?:expressed|written|rewritten|given|simplified) (?:as|by)"
    r"|the (?:sum|result|total))\s+(?:is\s+)?|[:=]\s*)+",
    re.I,
)
# "The answer must be positive, so x = 5": the value follows.
_CONCLUDES = re.compile(r"\s*,?\s*(?:so|hence|thus|therefore)\b[^=]*=\s*\S*\d\S*$", re.I)
_UNIT_NAME = (
    r"(?:years?|months?|weeks?|days?|hours?|hrs?|minutes?|mins?|seconds?|secs?|miles?|yards?|feet|foot|ft|inch(?:es)?|in"
    r"|pounds?|lbs?|ounces?|oz|dollars?|cents?|kilograms?|kg|grams?|g|met(?:er|re)s?|m|centimet(?:er|re)s?|cm)"
)
AMOUNT = re.compile(rf"(\d+(?:\.\d+)?)\s*({_UNIT_NAME})\b", re.I)
"""A number with its unit, of an amount in several units."""
AMOUNTS = re.compile(rf"{AMOUNT.pattern}(?:,?\s+(?:and\s+)?{AMOUNT.pattern})+", re.I)
"""An amount in several units: "5 feet 6 inches", "2 hours and 15 minutes"."""
_PROPORTION = re.compile(r"^(\d+) (?:out of|in) (\d+)$")
_ANSWERING_WORDS = ("yes", "no", "even", "odd", "true", "false")
_WORDS = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{3,}(?![A-Za-z{]*\})")
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_WORD_BEFORE_NUMBER = re.compile(
    rf"(?<!\S)(?!(?:and|or|pi|sin|cos|tan|log|ln|sqrt|exp|max|min|{_MONTHS})\b)[A-Za-z]{{2,}}[.,:]?\s.*\d"
)
TEXT = r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:rm|bf|sf|it|tt)|bf|rm|operatorname)\s*"
SPACE = r"(?:\\[ ,;:!]|\\q?quad|[~\s])"
_FRACTIONS = {"½": "12", "⅓": "13", "⅔": "23", "¼": "14", "¾": "34", "⅕": "15", "⅛": "18"}
_SIGNS = "times div cdot cdot pi infty le ge ne cup in pm approx"
SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# 7 million, $7$ million, 7\text{ million} and 7\text{ million dollars}, whose text continues.
_SCALE = re.compile(
    rf"(?<![\d.,/])(\d+(?:,\d{{3}})*(?:\.\d+)?)(\$?){SPACE}*({TEXT}\{{)?\s*({'|'.join(SCALES)})s?\b(?(3)\s*(\}})?)"
)
_TEENS = "ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen"
_ONES = "one|two|three|four|five|six|seven|eight|nine"
_SMALL_NUMBERS = f"zero|{_ONES}|{_TEENS}"
_TENS = "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
_VALUE_OF_SMALL = {word: value for value, word in enumerate(_SMALL_NUMBERS.split("|"))}
_VALUE_OF_TENS = {word: 10 * tens for tens, word in enumerate(_TENS.split("|"), start=2)}
# An answer that is a number in words and nothing else, but for a scale: "three", "forty-two", \text{two million}.
_IN_WORDS = re.compile(
    rf"^(?P<before>(?:{TEXT}\{{\s*)?)(?:(?P<tens>{_TENS})(?:[- ](?P<ones>{_ONES}))?"
    rf"|(?P<small>{_SMALL_NUMBERS}))(?=(?:\s+(?:{'|'.join(SCALES)})s?)?\s*\}}?[.!]?$)",
    re.I,
)


def _digits(match: re.Match[str]) -> str:
    """A match of :data:`_IN_WORDS` in digits: ``forty-two`` is ``42``."""
    before, tens, ones, small = match.groups()
    if small:
        return f"{before}{_VALUE_OF_SMALL[small.lower()]}"
    return f"{before}{_VALUE_OF_TENS[tens.lower()] + _VALUE_OF_SMALL[(ones or 'zero').lower()]}"


def _scaled(match: re.Match[str]) -> str:
    """``7 million`` as ``7000000``. In ``7\\text{ million dollars}`` the text command stays open."""
    digits, dollar, text_begins, scale, text_ends = match.groups()
    number = Decimal(digits.replace(",", "")) * SCALES[scale]
    still_open = text_begins if text_begins and not text_ends else ""
    return f"{decimal_text(number)}{dollar}{still_open}"


def _repeating(match: re.Match[str]) -> str:
    """A repeating decimal as a fraction: 0.1\\overline{6} is (16 - 1) / 90."""
    whole, once, repeating = match.groups()
    numerator = int(whole + once + repeating) - int(f"0{whole}{once}")
    denominator = 10 ** len(once) * (10 ** len(repeating) - 1)
    return rf"\frac{{{numerator}}}{{{denominator}}}"


# Symbols and layouts that math-verify reads as something else, or not at all.
_REWRITTEN = [
    (re.compile(pattern), text)
    for pattern, text in (
        (_IN_WORDS, _digits),
        (r"(?s)\\begin\{(cases|aligned)\}(.*?)\\end\{\1\}", lambda m: m[2].replace("&", "").replace(r"\\", ", ")),
        (r"\\(?:lor|vee)(?![A-Za-z])", ", "),
        (r"\\mbox\b", r"\\text"),
        (rf"(?<=\d)\^?\{{?(?:{TEXT}\{{)?(?:st|nd|rd|th)\}}*\.?$", lambda m: "}" * (m[0].count("}") - m[0].count("{"))),
        (r"\\(?:displaystyle|textstyle|left|right|[Bb]igg?[lr]?|color\{\w+\})(?![A-Za-z])", ""),
        (r"\\(?:bm|boldsymbol|underline|mathbf|textcolor\{\w+\})\s*\{([^{}]*)\}", r"{\1}"),
        (rf"{TEXT}\{{\s*(-?[\d.,/]+)\s*\}}", r"\1"),
        (rf"^{TEXT}\{{[^{{}}]*(?:\bis|\bare|\bbe|[=:])\s*\}}", ""),
        (rf"{TEXT}\{{\s*([€£¥])\s*\}}", r"\1"),
        (rf"{TEXT}\{{([ei])\}}", r" \1"),
        (rf"(?:{TEXT})?\{{\s*([-−–])\s*\}}", "-"),
        (r"\((\w+)\)_", r"\1_"),
        (rf"^{TEXT}\{{\s*(-?(?:\\?\$)?[\d.,/]+)\s+([A-Za-z][A-Za-z. /]*)\}}$", r"\1\\text{\2}"),
        (r"(?<=\d)\{([A-Za-z]{2,})\}", r"\\text{\1}"),
        (_SCALE, _scaled),
        (r"(\.\d*?)(\d)\2\2+(?:\.\.+|…|\\[lcd]?dots)", r"\1\\overline{\2}"),
        (r"\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?", r"\\overline{\1\2\3}"),
        (r"\\dot\s*\{?(\d)\}?", r"\\overline{\1}"),
        (r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{?(\d+)\}?", _repeating),
        (r"^\{([A-Za-z(][A-Za-z0-9 ().,]*)\}$", r"\\text{\1}"),
        (rf"^({TEXT}\{{)\s*\(?([A-Z])\)\s+(?=\w)", r"\\text{(\2)}\1"),
        (r"\\varnothing|∅|^\\\{\s*\\\}$", r"\\emptyset"),
        (r"\\mathbb\s*([A-Z])(?![A-Za-z])", r"\\mathbb{\1}"),
        (r"\\R(?![A-Za-z])", r"\\mathbb{R}"),
        (r"\\(?:triangle|angle)\s*(?=[A-Z])", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac\s*(\\(?:pi|alpha|beta|theta))(?![A-Za-z])", r"\\frac{\1}"),
        *((sign, rf"\\{name} ") for sign, name in zip("×÷·⋅π∞≤≥≠∪∈±≈", _SIGNS.split())),
        ("[−–]", "-"),
        ("²", "^2"),
        ("³", "^3"),
        (r"\b(?:infinity)\b", r"\\infty "),
        (r"√\s*\(?(\w+)\)?", r"\\sqrt{\1}"),
        (r"(?<!\\)\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])pi\b", r"\\pi "),
        *((sign, rf"\\frac{{{digits[0]}}}{{{digits[1]}}}") for sign, digits in _FRACTIONS.items()),
        (rf"(?<=\d){SPACE}+(?=\\frac)", ""),
        (_PROPORTION, r"\\frac{\1}{\2}"),
        (r"\*\*", "^"),
        (r"(?<!\\)\*", r"\\cdot "),
        (r"\{([:,])\}", r"\1"),
        (rf"(?<![\d.])(\d{{1,3}})((?:(?:,?\\!|{SPACE})+\d{{3}})+)(?!\d)", lambda m: m[1] + re.sub(r"\D", "", m[2])),
        (r"(?<![\w.\\,(\[])(\d{1,3}(?:,\d{3})+)(?![\d,])", lambda m: m[1].replace(",", "")),
        (r"(?<!\\)\\[,;:!]|(?<!\\)~", " "),
        (rf"(?<![\w.}}])(\d+){SPACE}+(\d+)\s*/\s*(\d+)(?!\d)", r"\1\\frac{\2}{\3}"),
        (r"(?<=\d)(?:\\mathrm\{e\}|[eE])([+-]?\d+)(?!\w)", r"\\times 10^{\1}"),
        (r"(\\begin\{\w*matrix\}.*?\\end\{\w*matrix\})", lambda m: re.sub(r"(?<!\\)\\(?=[-\d\s])", r"\\\\", m[1])),
    )
]


def prepared(text: str) -> tuple[str, bool]:
    """What a response settles on.

    A supposition does not count, nor text that was corrected or denied later, nor several numbers that it leaves open.
    The first of these does: the last box with the boxes joined to it; the last ``<answer>``; the text after the last
    "answer is", "answer:" or "####" that gives a value; the whole, if it is only an answer.

    Returns:
        The answer as LaTeX, empty where it is cut off, and True; or the text in which to search for it, and False.
    """
    on_one_line = _DISPLAY.sub(r"\1\2\3", visible(text))
    text = _MARKUP.sub(lambda match: match["inside"] or "", on_one_line).strip()
    text = _SCALE.sub(_scaled, _DENIED.sub(" ", SUPPOSED.sub(" ", text)))
    answer: str | None = None
    about_answer: str | None = None
    tail = text[-_TAIL:].strip()
    open_until = _open_until(text)

    # From the last correction backwards to the whole text: the first part that settles on something.
    corrections = [match.end() for match in _CORRECTION.finditer(text)]
    for start in (*reversed(corrections), 0):
        part = text[start:]
        boxes = last_boxes(part)
        if boxes:
            return rewritten(", ".join(dict.fromkeys(boxes)) if all(boxes) else ""), True
        tagged = _TAGGED.findall(part)
        if tagged:
            answer = _in_tag(tagged[-1])
            if "\n" in answer:
                return rewritten(answer), True
            tail = answer  # what is outside of the tag does not count
            break
        corrected = _CORRECTED.fullmatch(part) if start else None
        if corrected:
            answer = corrected["rest"]
            break
        matches = list(_STATED.finditer(part[-_TAIL:]))
        if open_until:
            matches = [match for match in matches if not re.search(_MAYBE, match[0], re.I)]
        values, about = values_and_about(map(_statement, matches))
        if values:
            answer = values[-1]
            break
        if about:
            about_answer = about[-1]
    else:
        # No part states a value. What is said about the answer, such as "correct", counts only in a text without a
        # number: in "x = 5. The answer is correct" the value is elsewhere.
        answer = None if re.search(r"\d", tail) else about_answer

    if open_until and answer is None:
        tail = text[open_until:][-_TAIL:].strip()
    # First the stated answer, then the end of the text, each only if it is one line.
    for candidate in (answer, tail):
        if candidate and "\n" not in candidate.strip():
            settled = _settled(candidate, is_stated=candidate is answer)
            if settled is not None:
                return settled, True
    return _QUESTION.sub("", tail), False


def _in_tag(text: str) -> str:
    """What the text of an ``<answer>`` tag states, or all of it."""
    values, about = values_and_about(map(_statement, _STATED.finditer(text)))
    return next(reversed(values or about), text).strip()


def _statement(match: re.Match[str]) -> str:
    """The text of a match of :data:`_STATED`: the rest of the line, or the line below."""
    return match["below"] or match["rest"]


def _settled(candidate: str, *, is_stated: bool) -> str | None:
    """A line's answer as LaTeX, empty for a bound; None where the line is more than an answer.

    ``is_stated``: whether it follows "answer is" or the like, after which words of a sentence may follow.
    """
    formulas = list(_MATH.finditer(candidate.replace("\\$", "\\ ")))
    lead = candidate[: formulas[0].start()] if formulas else candidate
    words = _LEADING.sub("", lead, count=1) if _LEADING.match(lead) else lead
    if formulas and not re.search(r"\d", words) and not _SENTENCE_ENDS.search(words):
        joined = _joined_formulas(candidate, formulas)
        length_after = len(candidate) - joined[-1].end()
        if length_after < _LONGEST or is_stated:
            return rewritten(", ".join(formula[formula.lastgroup or 0] for formula in joined))
        return None
    clause = _IN_WORDS.sub(_digits, _SENTENCE_ENDS.split(words.strip())[0].strip())
    if is_stated and _BOUND.search(clause):
        return ""
    is_property = re.fullmatch(r"[a-z]+", clause) and clause not in _ANSWERING_WORDS
    if is_property and _CONCLUDES.match(words.strip().removeprefix(clause)):
        return None
    if AMOUNTS.fullmatch(clause) or _PROPORTION.fullmatch(clause):
        return rewritten(clause)
    if not clause or len(clause) > _LONGEST or _WORD_BEFORE_NUMBER.search(clause):
        return None
    allowed_words = 2 if any(character.isdigit() for character in clause) else 1
    without_text = re.sub(rf"{TEXT}\{{[^{{}}]*\}}", "", clause)
    if len(_WORDS.findall(without_text)) > allowed_words:
        return None
    goes_on = _SENTENCE_ENDS.search(words.strip().rstrip(".!"))
    return rewritten(clause) if is_stated or not goes_on else None


def _joined_formulas(text: str, formulas: Sequence[re.Match[str]]) -> list[re.Match[str]]:
    """The first formula and those joined to it by a comma, "and" or "or"."""
    joined = [formulas[0]]
    for before, after in pairwise(formulas):
        if not re.fullmatch(r"\s*,?\s*(?:\band\b|\bor\b)?\s*", text[before.end() : after.start()]):
            break
        joined.append(after)
    return joined


def _open_until(text: str) -> int:
    """Where the last of several different numbers ends that a text leaves open; 0 if it leaves none or one open."""
    hedges = list(_OPEN.finditer(text))
    numbers = {match[name] for match in hedges for name in ("first", "second") if match[name]}
    return hedges[-1].end() if len(numbers) > 1 else 0


def rewritten(answer: str) -> str:
    """An answer, such as a reference, as LaTeX that math-verify reads; empty where it is a bound."""
    answer = re.sub(r"^\$+|(?<!\\)\$+$|^\\[(\[]|\\[)\]]$", "", answer.strip())
    if _BOUND.search(answer):
        return ""
    for pattern, text in _REWRITTEN:
        answer = pattern.sub(text, answer)
    return re.sub(rf"^(?:{SPACE})+|(?:{SPACE}|[.,;:\\])+$", "", answer)
