# SPDX-License-Identifier: Apache-2.0
"""How a strategy looks: one hue, one dash, one marker, so that colour is never the only difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ngrpo.workbench.report.values import dig, rows

HUES = 7  # --hue0 (the baseline's grey) to --hue6 in style.css
_DASHES = 6
# Outlines around (0, 0), of about the same area.
_SHAPES = (
    "M-3 0A3 3 0 1 0 3 0A3 3 0 1 0 -3 0Z",
    "M-2.7 -2.7H2.7V2.7H-2.7Z",
    "M0 -3.7L3.5 2.6H-3.5Z",
    "M0 -3.9L3.4 0L0 3.9L-3.4 0Z",
    "M0 3.7L3.5 -2.6H-3.5Z",
    "M-1.2 -3.4H1.2V-1.2H3.4V1.2H1.2V3.4H-1.2V1.2H-3.4V-1.2H-1.2Z",
)


@dataclass(frozen=True)
class Series:
    """A strategy and its number in the list, 0 being the baseline or the first."""

    index: int
    name: str

    @property
    def classes(self) -> str:
        """The CSS classes of its hue and its dash; the pair is unique among the first 37."""
        hue = 0 if self.index == 0 else 1 + (self.index - 1) % (HUES - 1)
        return f"h{hue} d{(self.index + self.index // _DASHES) % _DASHES}"

    @property
    def shape(self) -> str:
        """The outline of its marker."""
        return _SHAPES[self.index % len(_SHAPES)]

    @property
    def hollow(self) -> bool:
        """Whether its marker is: that of every second half-dozen of strategies."""
        return bool(self.index // _DASHES % 2)


def all_series(results: Mapping[str, Any]) -> dict[str, Series]:
    """The look of each strategy of a comparison, of a diagnosis, or of both; the baseline comes first."""
    names = [str(row.get("id")) for row in rows(results, "strategies")]
    names += [str(row.get("name")) for row in rows(results, "diagnosis", "strategies")]
    baseline = dig(results, "baseline") or dig(results, "diagnosis", "baseline")
    ordered = dict.fromkeys([name for name in names if name == baseline] + names)
    return {name: Series(index, name) for index, name in enumerate(ordered)}
