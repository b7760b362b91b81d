# SPDX-License-Identifier: Apache-2.0
"""Values of a result file as text: no invisible characters, and a dash where a number is missing."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jinja2 import Undefined

from ngrpo.machine.console import span
from ngrpo.workbench.statistics import ENOUGH_SEEDS

MISSING = "–"
_LARGEST = 1e100  # beyond it differences overflow; nothing measured is that large
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# Control characters as symbols; those without a symbol, and what UTF-8 cannot hold, as U+FFFD.
_VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], 0xFFFD)


def dig(data: object, *keys: str) -> Any:
    """The value under nested keys, None where a key is absent or its holder is no mapping."""
    for key in keys:
        if not isinstance(data, Mapping):
            return None
        data = data.get(key)
    return data


def rows(data: object, *keys: str) -> list[Any]:
    """The list under nested keys; an empty one where there is none."""
    return dig(data, *keys) or []


def number(data: object, *keys: str) -> float | None:
    """A finite number, or the one under nested keys; None for anything else."""
    value = dig(data, *keys)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= _LARGEST else None  # NaN compares as false


def ends(interval: Sequence[object] | None) -> tuple[float, float] | None:
    """Both ends of an interval, None where one is missing."""
    if not interval:
        return None
    low, high = (number(end) for end in interval)
    return None if low is None or high is None else (low, high)


def failed_runs(failed_seeds: Mapping[str, Sequence[int]]) -> str:
    """``2 of neighbor and 1 of none``: the failed runs of arms, by their ids; empty where none has failed."""
    return " and ".join(f"{len(seeds)} of {arm}" for arm, seeds in failed_seeds.items() if seeds)


def format_number(value: object, digits: int = 3, *, sign: bool = False) -> str:
    """A number with this many decimals, ``–`` where there is none; a difference with its ``sign``: ``+0.031``.

    It has two significant digits from 1e9 on, and if ``digits`` is above 3 also below 5 · 10^-digits.
    """
    amount = number(value)
    if amount is None:
        return MISSING
    too_large = abs(amount) >= 1e9
    too_small = digits > 3 and 0 < abs(amount) < 0.1**digits * 5
    text = short_exponent(f"{amount:.2g}") if too_large or too_small else f"{amount:,.{digits}f}"
    plus = "+" if sign and amount > 0 else ""
    return plus + text.replace("-", "−")


def told_apart(labels: Callable[[int], list[str]], decimals: Iterable[int]) -> list[str]:
    """The labels with the fewest decimals with which all differ; with the most, if they never do."""
    made: list[str] = []
    for count in decimals:
        made = labels(count)
        if len(set(made)) == len(made):
            break
    return made


def short_exponent(text: str) -> str:
    """Python's number with an exponent as people write it: ``5e-6`` for ``5e-06``, ``2e9`` for ``2e+09``."""
    return re.sub(r"e(-?)\+?0*(\d)", r"e\1\2", text)


def first_and_last(by_step: Mapping[Any, object]) -> str:
    """A curve's ends: ``0.125 (step 0) → 0.750 (step 3)``."""
    points = sorted((int(step), value) for step, value in by_step.items())
    ends = points if len(points) == 1 else [points[0], points[-1]]
    return " → ".join(f"{format_number(value)} (step {step})" for step, value in ends)


def between(low: object, high: object, digits: int = 3, *, sign: bool = False) -> str:
    """An interval, ``0.381 to 0.442``; ``–`` where an end is missing."""
    if number(low) is None or number(high) is None:
        return MISSING
    return f"{format_number(low, digits, sign=sign)} to {format_number(high, digits, sign=sign)}"


def with_ends(value: object, low: object, high: object, digits: int = 3, *, sign: bool = False) -> str:
    """A value with its interval, ``0.412 (0.381 to 0.442)``; alone where an end is missing."""
    text = format_number(value, digits, sign=sign)
    interval = between(low, high, digits, sign=sign)
    return text if interval == MISSING else f"{text} ({interval})"


def shares(unscored: object) -> str:
    """The responses that were cut, were unreadable, or timed out: ``3% / 0% / –``."""
    texts = []
    for key in ("cut", "unreadable", "timed_out"):
        share = number(unscored, key)
        texts.append(MISSING if share is None else f"{share:.0%}")
    return " / ".join(texts)


def noise(difference: object) -> str | None:
    """The outcome of a difference's test; None where it was not tested. Too few seeds are never beyond noise."""
    within = dig(difference, "within_noise")
    if within is None:
        return None
    if within:
        return "within noise"
    seeds = _seeds(difference)
    return "beyond noise" if seeds >= ENOUGH_SEEDS else f"only {plural(seeds, 'seed')}"


def has_few_seeds(difference: object) -> bool:
    """Whether a difference is of fewer seeds than tell a method from luck."""
    return _seeds(difference) < ENOUGH_SEEDS


def _seeds(difference: object) -> int:
    """The number of seeds of a difference; one that does not state it has enough, unless it is over problems."""
    if dig(difference, "over") == "problems":
        return 1
    return int(number(difference, "seeds") or ENOUGH_SEEDS)


def size(value: object) -> str:
    """Bytes for people: ``1.91 GiB``."""
    amount = number(value)
    if amount is None:
        return MISSING
    power = min(len(_UNITS) - 1, int(math.log2(max(abs(amount), 1)) // 10))
    decimals = 0 if power == 0 else 2
    return f"{amount / 1024**power:.{decimals}f} {_UNITS[power]}"


def duration(value: object) -> str:
    """Seconds for people: ``12 min``."""
    amount = number(value)
    return MISSING if amount is None else span(amount)


def shown(value: object) -> str:
    """A value as visible text, not escaped; ``–`` for None, what is absent, the empty string, NaN and infinities."""
    missing = value is None or value == "" or isinstance(value, Undefined)
    not_finite = isinstance(value, float) and not math.isfinite(value)
    return MISSING if missing or not_finite else str(value).translate(_VISIBLE)


def token(value: object) -> str:
    """A token on one line, not escaped: ``⏎`` for a new line, ``⇥`` for a tab, ``␣`` for spaces alone."""
    text = str(value).translate(_VISIBLE).replace("\n", "⏎").replace("\t", "⇥")
    return text if text.strip() else text.replace(" ", "␣")


def shortened(text: str, length: int = 110) -> str:
    """Text on one line, cut at a length."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


def plural(count: int, word: str) -> str:
    """``1 run``, ``3 runs``."""
    if count == 1:
        return f"1 {word}"
    return f"{count:,} {word}s"
