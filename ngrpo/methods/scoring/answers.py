# SPDX-License-Identifier: Apache-2.0
"""Reading a response: its generated part, boxes, statements and numbers; and checks of math answers and of letters."""

import json
import os
import re
import string
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from decimal import Decimal
from importlib.util import find_spec
from typing import Any

from ngrpo.machine.storage.datafiles import decimal_text
from ngrpo.methods.scoring import TIMED_OUT, Verdict
from perturbations.errors import UsageError

_THOUGHT = re.compile(r"<(think|thinking)>.*?</\1>", re.DOTALL)
_THOUGHT_BEGINS = re.compile(r"<think(?:ing)?>")
_THOUGHT_ENDS = re.compile(r"</think(?:ing)?>")
_BOX = re.compile(r"\\(?:boxed|fbox)")
# A response that repeats the instruction has one, "the final answer in \boxed{}", and math-verify passes over it too.
_EMPTY_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{\s*\}")
_BETWEEN_BOXES = re.compile(
    r"(?=.*(?:(?<!\\),|\band\b|\bor\b))"
    r"(?:[\s$,~]|\\[() ,;:!]|\\q?quad(?![A-Za-z])|\band\b|\bor\b|\\text\{\s*,?\s*(?:and|or)?\s*\})*",
    re.DOTALL,
)
# The tokens with which models end a response: of ChatML, Llama, DeepSeek (in wide bars), Gemma, SmolVLM, MiniMax.
_END = re.compile(r"\s*(?:(?:<[|｜][^|｜<>]*[|｜]>|</s>|<(?:eos|end_of_turn|end_of_utterance)>|<turn\|>|\[e~\[)\s*)+$")
# The last characters of a prompt, by which its end is found where its beginning was cut off. So many are within a
# template's opening of the response.
_PROMPT_END = 12
# 1,234.50 and 12 are numbers; the 3 of x3 is not. The minus of 8-5 is not a sign.
_NUMBER = re.compile(r"(?:(?<![\w)\].])-)?(?<![\w.])(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
RESULT_MARK = r"(?<!#)####(?!#)(?!\W*(?:\d+[.):]\s+)?[A-Za-z]{3,}[^\n\d]*\n\s*\S)(?!\s*\d+[.):]\s+[A-Za-z])"
"""A pattern for the #### before a result (GSM8K), which is no heading: "#### Step" with text below, "#### 5. Proof"."""
# "the answer is 12", "Answer: **12**", "#### 12": the rest of the line, of the last such statement.
_STATEMENT = re.compile(
    rf"(?:\banswer\b[^\n:=.]{{0,40}}?(?:\bis\b|:|=)|{RESULT_MARK})\s*:?\s*(?P<rest>[^\n]+)", re.IGNORECASE
)
SUPPOSED = re.compile(
    r"(?<!\bI )(?<!\bI[’']d )(?<!\bwould )"
    r"\b(?:if|suppose|assum(?:e|ing)|let)\s+(?:that\s+)?(?:(?:we|you|one)\s+(?:choose|select|pick|take)"
    r"|(?:the\s+)?(?:\w+\s+)?(?:answer|option|choice)\s+(?:is|was|were|be))\b",
    re.IGNORECASE,
)
"""The beginning of a supposition, which states no answer: "If we choose C", "suppose the answer is 42"."""
# "The answer is correct" and "the answer is found by adding" are about an answer that the text has elsewhere.
_ABOUT_ANSWER = re.compile(
    r"\W*(?:(?:indeed|still|also|therefore|thus|clearly|both)\s+)*"
    r"(?:(?:correct|right|unchanged|verified|confirmed|consistent|reasonable|plausible|sensible|valid|unique|accurate)"
    r"(?=\s*(?:[.,;:!)]|$|\b(?:and|as|because|for|given|in|since|when|with)\b))"
    r"|(?:found|obtained|computed|calculated|derived|determined)\s+(?:by|from|using|with)\b)",
    re.IGNORECASE,
)


def generated(query: str, prompt: str) -> str:
    """The generated part of a decoded sequence without its end token, after a ``<think>`` that ends its prompt.

    Where the prompt was cut or decodes differently, the text after the prompt's last characters is taken.
    """
    is_whole = query.startswith(prompt)
    text = query.removeprefix(prompt) if is_whole else query.rpartition(prompt[-_PROMPT_END:])[2]
    text = _END.sub("", text)
    return f"<think>{text}" if prompt.rstrip().endswith("<think>") else text


def visible(text: str) -> str:
    """The text without its thinking and without empty boxes. A thinking that was not closed reaches to the end."""
    without_thoughts = _THOUGHT.sub("", text)
    after_last_end = _THOUGHT_ENDS.split(without_thoughts)[-1]  # a template may have opened the thinking
    return _EMPTY_BOX.sub("", _THOUGHT_BEGINS.split(after_last_end)[0])


def last_boxes(text: str) -> list[str]:
    """The contents of the last ``\\boxed{...}`` and of boxes joined to it by a comma, "and" or "or".

    Braces are balanced; ``\\boxed 3`` gives ``3``. A last box that was cut off gives an empty content. Of nested boxes
    the inner ones count.
    """
    contents: list[str] = []
    begin = len(text)
    for box in reversed(list(_BOX.finditer(text))):
        content, end = _content(text, box.end())
        if end > begin:  # it is around the boxes after it
            continue
        if contents and not _BETWEEN_BOXES.fullmatch(text[end:begin]):
            break
        contents.insert(0, content)
        begin = box.start()
    return contents


def last_boxed(text: str) -> str | None:
    """The last of :func:`last_boxes`; None where there is none."""
    return next(reversed(last_boxes(text)), None)


def _content(text: str, start: int) -> tuple[str, int]:
    """What a box holds, and where it ends."""
    rest = text[start:]
    if not rest.lstrip(" ").startswith("{"):
        word = re.match(r" +([^\s$]+)", rest)
        return (word[1], start + word.end()) if word else ("", start)
    depth = 0
    for index, character in enumerate(rest):
        # An escaped brace, as in \{1, 2\}, opens and closes nothing.
        if character in "{}" and rest[index - 1 : index] != "\\":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return rest[:index].strip().removeprefix("{").strip(), start + index + 1
    return "", len(text)


def stated(text: str) -> str | None:
    """What follows the last "answer is", "answer:" or "####", to the end of its line.

    A statement about an answer, such as "the answer is correct", counts only where there is no other.
    """
    statements = _STATEMENT.finditer(SUPPOSED.sub(" ", text))
    values, about = values_and_about(match["rest"].strip() for match in statements)
    return next(reversed(values or about), None)


def values_and_about(statements: Iterable[str]) -> tuple[list[str], list[str]]:
    """What follows each "answer is": the values of answers, and what is only about an answer, such as "correct"."""
    values: list[str] = []
    about: list[str] = []
    for statement in statements:
        if _ABOUT_ANSWER.match(statement):
            about.append(statement)
        else:
            values.append(statement)
    return values, about


def numbers(text: str, *, alone: bool = False) -> list[str]:
    """The numbers in a text, each in one form: ``1,200.50`` is ``1200.5``, and ``-0`` is ``0``.

    ``alone`` leaves numbers with a letter right after them out, such as those of ``2x`` and ``3rd``.
    """
    in_one_form: list[str] = []
    for match in _NUMBER.finditer(text):
        if alone and re.match(r"\w", text[match.end() :]):
            continue
        in_one_form.append(decimal_text(Decimal(match[0].replace(",", ""))))
    return in_one_form


def last_number(text: str) -> str | None:
    """The last number in a text, in one form; None where there is none."""
    return next(reversed(numbers(text)), None)


def last_statement(text: str) -> str | None:
    """A canonical final answer where nothing is known of its kind: boxed, or stated, or the last number or line."""
    text = visible(text)
    statement = last_boxed(text) or stated(text) or text
    number = last_number(statement)
    if number:
        return number
    lines = [line for line in statement.splitlines() if line.strip()]
    return " ".join(lines[-1].lower().strip(" .*").split()) if lines else None


def outcome(text: str) -> str:
    """The result of a response: the last box, else the last number, else the text in lower case with single spaces.

    Unlike :func:`last_statement` it keeps all of a box, such as a fraction.
    """
    text = visible(text)
    boxed = "".join((last_boxed(text) or "").split())
    return boxed or last_number(text) or " ".join(text.lower().split())


# --- math -------------------------------------------------------------------------------------------
# Some answers take sympy for ever, such as 9^(9^9) multiplied out, which no exception interrupts; a child process can
# be ended. It is a program of its own: a fork would copy the threads of a model, and multiprocessing would run the
# parent's script once more.

_lock = threading.Lock()
_child: Any = None


def check_math(answer: str, text: str) -> Verdict:
    """Compares a response with the reference (LaTeX or plain) from any thread; docs/evaluation.md has the rules.

    Returns:
        The verdict; ``timed_out`` where two tries took more than `math_equality.CPU_SECONDS` of the processor each.

    Raises:
        UsageError: where math-verify is not installed.
    """
    with _lock:
        verdict = _ask(answer, text)
        return _ask(answer, text) if verdict.verdict == TIMED_OUT else verdict


def _ask(answer: str, text: str) -> Verdict:
    """The verdict of the child process, which is started where none runs. It ends when its pipe from here closes."""
    global _child
    if _child is None or _child.poll() is not None:
        if find_spec("math_verify") is None:
            raise UsageError(
                "math answers are checked by math-verify, which is not installed. Run: pip install math-verify"
            )
        _child = subprocess.Popen(
            [sys.executable, "-m", "ngrpo.methods.scoring.math_equality"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        )
    with suppress(BrokenPipeError):
        print(json.dumps([answer, text]), file=_child.stdin, flush=True)
    reply = _child.stdout.readline()
    if reply:
        return Verdict(**json.loads(reply))
    # The code is negative where a signal has ended the child: at its time limit, or where memory has run out.
    if _child.wait() > 0:
        raise UsageError(
            f"the process that checks math answers did not start. Try: {sys.executable} -c 'import math_verify'"
        )
    return Verdict(TIMED_OUT)


# --- multiple choice --------------------------------------------------------------------------------

_MARKUP = re.compile(
    r"<\|[^|<>]*\|>|</?s>|[*_`${}]|\\[()\[\],;:! ]"
    r"|\\(?:text(?:bf|it|rm)?|math(?:rm|bf)|bf|rm)(?![A-Za-z])|^[ \t]*#+[ \t]",
    re.MULTILINE,
)
_DENIED = re.compile(r"(?:\bnot|n[’']t|\bnever|\bcannot)\s+(?:be\s+)?(?:option\s+|choice\s+)?\(?[A-Za-z]\)?(?![\w’'])")
# The answer follows these: "the answer is", "Answer:", "I choose", "wait, actually,". After "it must be" and "so" other
# letters than an answer's may follow.
_CORRECTION = r"wait|actually|correction|sorry|on\s+second\s+thought"
_CUE = re.compile(
    r"\b(?:answer|option|choice)\b[^\n.:;,]{0,30}?(?:\bis\b|\bbe\b|:|=|\s-)"
    r"|\bans(?:wer)?\b[.:,]?|<answer>|####"
    r"|\b(?:choose|select|pick|take|go(?:ing)?\s+with)\b"
    rf"|\b(?:{_CORRECTION}|i\s+(?:mean|would\s+say)|no(?=[,.:;]))\b"
    r"|(?P<weak>\b(?:it|that|this)(?:[’']s|\s+(?:is|must\s+be|has\s+to\s+be|should\s+be))"
    r"|\b(?:so|hence|thus|therefore)\b)",
    re.I,
)
_FILLER = re.compile(
    r"(?:[\s:,=\"-]|\b(?:definitely|clearly|simply|probably|likely|most|therefore|thus|actually|but|is|it|the|correct"
    r"|option|choice|letter|answer|no|i\s+(?:think|believe|guess|mean|would\s+say))\b)*",
    re.I,
)
# What makes a letter after a weak cue an answer although there is one already: the sentence has nothing else.
_ENDS_SENTENCE = re.compile(r"[\[(\"']?[A-Z][\])\"']?\s*(?:[.!]|$)", re.MULTILINE)
# "Wait, actually" before "it's B": the answer is corrected.
_CORRECTS = re.compile(rf"\b(?:{_CORRECTION}|i\s+mean|no)\b[\s,.:;–—-]*$", re.I)
_BARE_VARIABLE = re.compile(r"[a-z](?![\w’')\]])")
_LETTER = re.compile(r"(?P<open>[\[(\"']?)(?P<letter>[A-Za-z])(?P<close>[\])\"']?)(?![\w’'])(?P<rest>[^\n]*)")
_ENDS = re.compile(
    r"\s*(?:$|[.,;:!?)–—-]|</|\b(?:because|since|as|which|for|with|by(?!-)|rather|instead)\b"
    r"|is\s+(?:the\s+)?(?:correct|right|best)"
    r"|\s+\((?!\s*(?:or|and)\b|[A-Za-z]\)))"  # the option's text, as in "B (15)"
)
_TEXT_ENDS = re.compile(
    r"\W*(?:\n|$)|[.;!<)](?:\s|$|/)|,?\s+(?:because|since|as|\(?(?:option\s+)?[A-Z]\b)"
    r"|\s+is\s+(?:the\s+)?(?:correct|right)"
)
_SEVERAL = re.compile(r"\s*(?:,|/|&|,?\s*\bor\b|,?\s*\band\b)\s*\(?[A-Za-z]\)?(?![\w’'])")
# What rules several letters out, right after them: "A, C and D are incorrect", "A or C cannot hold".
_RULED_OUT = re.compile(
    rf"(?:{_SEVERAL.pattern})+\s+(?:(?:are|is|were|can|could|must\s+be|have\s+been|all|both|therefore|clearly)\s+)*"
    r"(?:incorrect|wrong|false|invalid|impossible|eliminated|excluded|ruled\s+out|out\b|not\b|cannot\b|\w+n[’']t\b)",
    re.I,
)
_NAMED = re.compile(
    r"(?<![\w’'])(?<!\b[A-Za-z], )(?<!\bor )(?<!\band )\(?(?P<letter>[A-Z])\)?"
    r"\s+is\s+(?:(?:definitely|clearly|the|my)\s+)*(?:correct|right|best|(?:final\s+)?answer)\b"
    r"(?!\s+(?:only|if|when|in|for|under|but|about|sign|form|unit|order|magnitude|idea|to\b))"
)
_ALONE = re.compile(r"^\W*(?:(?:option|choice)\s+)?(?:\(([A-Za-z])\)|([A-Z]))\W*$", re.MULTILINE | re.I)
_LISTED = re.compile(r"^\W*([A-Z])\s*[.):]\s*\S|\(([A-Z])\)", re.MULTILINE)


def check_choice(answer: str, text: str, options: Sequence[str] | None = None) -> Verdict:
    """Compares the letter that a response settles on, ``extracted`` in the verdict, with the right one.

    Where the options' texts are given, only their letters count, and an option's text counts as its letter.
    """
    letter = chosen_letter(text, options)
    return Verdict.of(letter is not None and letter == answer.strip().strip("().").upper(), letter)


def chosen_letter(text: str, options: Sequence[str] | None = None) -> str | None:
    """The letter of the last statement; a letter alone, or the only one in a list, where nothing is stated outright."""
    text = _DENIED.sub(" ", SUPPOSED.sub(" ", visible(text)))
    letter_of: dict[str, str] = {}  # by an option's text
    for option, letter in zip(options or (), string.ascii_uppercase):
        letter_of[_plain(option).lower()] = letter
    claims = _stated_letters(text, letter_of) or [_letter_alone(text, letter_of)]
    allowed = letter_of.values() if letter_of else [*string.ascii_uppercase]
    return claims[-1] if claims[-1] in allowed else None


def _stated_letters(text: str, letter_of: dict[str, str]) -> list[str]:
    """The letters that a response states, the one it settles on last.

    Statements from the last box on count alone. Where there are none, the box's content counts after the statements
    before it.
    """
    boxes = last_boxes(text)
    if not boxes:
        return _claims(text, letter_of)
    box_begins = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    after = _claims(text[box_begins:], letter_of, is_answered=True)
    if after:
        return after
    claims = _claims(text[:box_begins], letter_of)
    # A box that was cut off has no content, and states nothing.
    in_box = _claim(_plain(", ".join(dict.fromkeys(boxes))), letter_of) if all(boxes) else ""
    if in_box is not None:
        claims.append(in_box)
    return claims


def _letter_alone(text: str, letter_of: dict[str, str]) -> str:
    """The letter alone on its line, or the only one in a list, or that of the option which is the whole text."""
    plain = _plain(text)
    letters = {(in_brackets or bare).upper() for in_brackets, bare in _ALONE.findall(plain)}
    if not letters:
        letters = {listed or in_brackets for listed, in_brackets in _LISTED.findall(plain)}
    if len(letters) == 1:
        return letters.pop()
    return letter_of.get(plain.strip(" .\n").lower(), "")


def _plain(text: str) -> str:
    return _MARKUP.sub("", text)


def _claims(text: str, letter_of: dict[str, str], *, is_answered: bool = False) -> list[str]:
    """The letters that are stated, in order; an empty one where several are stated at once.

    ``is_answered``: whether a box before the text has an answer.
    """
    plain = _plain(text)
    claims = [(match.start(), match["letter"]) for match in _NAMED.finditer(plain)]
    for cue in _CUE.finditer(plain):
        following = plain[cue.end() :]
        claim = _option_claimed(following, letter_of)
        if claim is None:
            is_later = is_answered or any(position < cue.end() for position, _ in claims)
            corrects = _CORRECTS.search(plain[: cue.start()]) is not None
            if cue["weak"] and not corrects and not _names_answer(following, is_later=is_later):
                continue
            claim = _letter_claimed(following, letter_of)
        if claim is not None:
            claims.append((cue.end(), claim))
    return [letter for _, letter in sorted(claims)]


def _names_answer(text: str, *, is_later: bool) -> bool:
    """Whether a letter after "so" or "it is" may be an answer; ``is_later``: whether there is an answer already."""
    text = _without_filler(text)
    return bool(_ENDS_SENTENCE.match(text)) if is_later else not _BARE_VARIABLE.match(text)


def _without_filler(text: str) -> str:
    """A text without the words between a cue and its answer, as "most likely" in "is most likely B"."""
    return _FILLER.sub("", text, count=1).strip()


def _claim(text: str, letter_of: dict[str, str]) -> str | None:
    """The letter that a text begins with, itself or by its option's text.

    Empty for several letters; None for no letter, and for several that the text rules out.
    """
    claim = _option_claimed(text, letter_of)
    return _letter_claimed(text, letter_of) if claim is None else claim


def _option_claimed(text: str, letter_of: dict[str, str]) -> str | None:
    """The letter of the option whose text a text begins with; None for none."""
    for beginning in (text.strip(' :="\n'), _without_filler(text)):  # "No increase" begins with a filler
        for option, letter in letter_of.items():
            if option and beginning.lower().startswith(option) and _TEXT_ENDS.match(beginning[len(option) :]):
                return letter
    return None


def _letter_claimed(text: str, letter_of: dict[str, str]) -> str | None:
    """As :func:`_claim`, by the letter itself."""
    match = _LETTER.match(_without_filler(text))
    if not match:
        return None
    letter = match["letter"].upper()
    rest = match["rest"]
    if _SEVERAL.match(rest):
        return None if _RULED_OUT.match(rest) else ""
    if _ENDS.match(rest):
        return letter
    if match["close"] and not re.match(r"\s*is\b", rest):
        return letter
    following = rest.strip(" .):").lower()
    own_texts = [option for option, its_letter in letter_of.items() if option and its_letter == letter]
    return letter if any(following.startswith(option) for option in own_texts) else None
