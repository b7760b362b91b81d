# SPDX-License-Identifier: Apache-2.0
"""The diagnosis on the screen: one line per strategy, and plain warnings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ngrpo.machine.console.text import text_table
from ngrpo.workbench.report.values import dig, figure

if TYPE_CHECKING:
    from ngrpo.config.arms import Arm

# Heading, where the number is, digits.
_COLUMNS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("reward", ("reward",), 3),
    ("pass@{group}", ("pass_at_k", "{group}"), 3),
    ("learnable", ("learnable_groups",), 2),
    ("DIVERSITY", ("diversity", "score"), 3),
    ("answers", ("diversity", "distinct_answers"), 2),
    ("results", ("diversity", "distinct_intermediate"), 2),
    ("edit", ("diversity", "edit_distance"), 2),
    ("self-BLEU", ("diversity", "self_bleu"), 2),
    ("VALIDITY", ("validity", "score"), 3),
    ("parsed", ("validity", "parseable"), 2),
    ("loops", ("validity", "repetition"), 2),
    ("perplexity", ("validity", "perplexity"), 2),
    ("anchor near", ("validity", "anchor_nearest"), 2),
    ("shift", ("relative_shift",), 3),
    ("rate", ("rate",), 3),
    ("tokens/s", ("tokens_per_second",), 0),
)
_MOSTLY = 0.5


def table(diagnosis: dict[str, Any]) -> str:
    """The strategies as aligned columns; an unknown number is a dash."""
    group = str(diagnosis["group"])
    head = ["", *(heading.format(group=group) for heading, _, _ in _COLUMNS)]
    rows = [head]
    for strategy in diagnosis["strategies"]:
        values = (dig(strategy, *(key.format(group=group) for key in path)) for _, path, _ in _COLUMNS)
        rows.append([strategy["name"], *(figure(value, digits) for value, (_, _, digits) in zip(values, _COLUMNS))])
    return "\n".join(text_table(rows))


def differences(diagnosis: dict[str, Any]) -> str:
    """One line per strategy: its paired differences to the unperturbed one, and whether they are within noise."""
    lines = []
    for strategy in diagnosis["strategies"]:
        parts = []
        for name, difference in (strategy["difference"] or {}).items():
            noise = ", within noise" if difference["within_noise"] else ""
            parts.append(
                f"{name} {difference['value']:+.3f} ({difference['low']:+.3f} to {difference['high']:+.3f}{noise})"
            )
        if parts:
            lines.append(f"{strategy['name']} against {diagnosis['baseline']}: {'; '.join(parts)}")
    return "\n".join(lines)


def warnings_of(rows: Sequence[dict[str, Any]], strategies: Sequence[Arm]) -> list[str]:
    """What a reader should know before trusting or training anything.

    Args:
        rows: ``strategies`` of diagnosis.json.
        strategies: in the same order.
    """
    warnings = []
    for row, strategy in zip(rows, strategies):
        if row["single_trajectory_groups"] == 1.0:
            why = f" ({strategy.notes[0]})" if strategy.notes else ""
            warnings.append(f"{strategy.id}: every group is one trajectory, so there is nothing to learn from{why}")
            continue
        warnings.extend(f"{strategy.id}: {note}" for note in strategy.notes)
        if row["same_input_groups"] > _MOSTLY:
            warnings.append(
                f"{strategy.id}: in {row['same_input_groups']:.0%} of the groups all answers were fed the same inputs,"
                " so that what is drawn in the text changes nothing that follows; lower the rate"
            )
        if row["learnable_groups"] == 0.0:
            what = "wrong" if row["reward"] == 0.0 else "right" if row["pass_at_k"]["1"] == 1.0 else "rewarded alike"
            warnings.append(f"{strategy.id}: in every group all answers are {what}; GRPO's advantages are all zero")
        if row["validity"]["parseable"] < _MOSTLY:
            warnings.append(
                f"{strategy.id}: {1 - row['validity']['parseable']:.0%} of the answers have no final answer"
            )
        if row["validity"]["repetition"] > _MOSTLY:
            warnings.append(f"{strategy.id}: {row['validity']['repetition']:.0%} of the answers end in a loop")
        if row["truncated"] > _MOSTLY:
            warnings.append(
                f"{strategy.id}: {row['truncated']:.0%} of the answers reach the length limit; raise --max-tokens"
            )
    return warnings
