# SPDX-License-Identifier: Apache-2.0
"""Values of a result file as text: nothing hidden in strings, numbers with a dash where there is none."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Undefined

from ngrpo.machine.console.progress import span

MISSING = "–"
_LARGEST = 1e100  # Beyond it differences overflow; nothing measured is that large.
_CONTROLS = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {0x7F: 0x2421}
_SURROGATES = re.compile("[\ud800-\udfff\x80-\x9f]")
# What turns the direction of the text around it, shown by name instead of obeyed.
_DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def dig(data: object, *keys: str) -> Any:
    """The value under nested keys, None where a key is absent or its holder is no mapping."""
    for key in keys:
        if not isinstance(data, Mapping):
            return None
        data = data.get(key)
    return data


def rows(data: object, *keys: str) -> list[Mapping[str, Any]]:
    """The mappings of a list under nested keys; an empty list where there is none."""
    part = dig(data, *keys)
    return [row for row in part if isinstance(row, Mapping)] if isinstance(part, list | tuple) else []


def number(value: object) -> float | None:
    """A finite number, or None for everything else: null, NaN, infinities, text, true and false."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= _LARGEST else None  # NaN compares as false


def numbers(value: object, count: int) -> list[float] | None:
    """A list of exactly ``count`` finite numbers, else None."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != count:
        return None
    parts = [number(part) for part in value]
    return None if None in parts else [part for part in parts if part is not None]


def figure(value: object, digits: int = 3) -> str:
    """A number with so many decimals, ``–`` where there is none."""
    amount = number(value)
    if amount is None:
        return MISSING
    if amount and (abs(amount) >= 1e9 or (digits > 3 and abs(amount) < 0.1**digits * 5)):
        return f"{amount:.2g}".replace("-", "−")
    return f"{amount:,.{digits}f}".replace("-", "−")


def signed(value: object, digits: int = 3) -> str:
    """A difference with its sign: ``+0.031``, ``−0.012``, ``0.000``."""
    text = figure(value, digits)
    amount = number(value)
    return f"+{text}" if amount is not None and amount > 0 else text


def between(low: object, high: object, digits: int = 3, *, sign: bool = False) -> str:
    """An interval, ``0.381 to 0.442``; ``–`` where an end is missing."""
    if number(low) is None or number(high) is None:
        return MISSING
    show = signed if sign else figure
    return f"{show(low, digits)} to {show(high, digits)}"


def noise(difference: object) -> str | None:
    """What is said of a difference that was tested; None where that is unknown. One seed is never beyond noise."""
    within = dig(difference, "within_noise")
    if not isinstance(within, bool):
        return None
    return "within noise" if within else "one seed" if dig(difference, "over") == "problems" else "beyond noise"


def size(value: object) -> str:
    """Bytes for people: ``1.91 GiB``."""
    amount = number(value)
    if amount is None:
        return MISSING
    power = min(4, int(math.log2(max(abs(amount), 1)) // 10))
    return f"{amount / 1024**power:.{0 if power == 0 else 2}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def duration(value: object) -> str:
    """Seconds for people, as :func:`ngrpo.machine.console.progress.span` says them."""
    amount = number(value)
    return MISSING if amount is None else span(amount)


def visible(value: object) -> str:
    """Text in which nothing is invisible, turns the reading direction, or cannot be written as UTF-8."""
    text = str(value)
    if text.isascii() and text.isprintable():
        return text
    text = _SURROGATES.sub("\ufffd", text).translate(_CONTROLS)
    return _DIRECTIONS.sub(lambda match: f"[U+{ord(match[0]):04X}]", text)


def shown(value: object) -> str:
    """A value as visible text, not escaped; ``–`` for None, what is absent, the empty string, NaN and infinities."""
    missing = value is None or value == "" or isinstance(value, Undefined)
    return MISSING if missing or (isinstance(value, float) and not math.isfinite(value)) else visible(value)


def token(value: object) -> str:
    """A token on one line, not escaped: ``⏎`` for a new line, ``⇥`` for a tab, ``␣`` for spaces alone."""
    text = visible(value).replace("\n", "⏎").replace("\t", "⇥")
    return text if text.strip() else text.replace(" ", "␣")


def plural(count: int, word: str) -> str:
    """``1 run``, ``3 runs``, ``2 strategies``."""
    if count == 1:
        return f"1 {word}"
    return f"{count:,} {word[:-1]}ies" if word.endswith("y") else f"{count:,} {word}s"
