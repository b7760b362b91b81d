# SPDX-License-Identifier: Apache-2.0
"""Scalars of OpenRLHF's TensorBoard log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Series = dict[str, dict[int, float]]


def read_scalars(folder: Path, since: float = 0.0) -> Series:
    """Every scalar under a folder.

    Args:
        folder: the log folder; event files may lie in subfolders (one per run, in OpenRLHF 0.11.2).
        since: Unix time; files last written before it belong to earlier runs and are left out.

    Returns:
        ``{tag: {step: value}}``, steps ascending; a later file wins where two have the same step.
    """
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    # One second: event files carry coarser times than the clock on some file systems.
    files = [f for f in folder.rglob("events.out.tfevents.*") if f.stat().st_mtime >= since - 1.0]
    series: Series = {}
    for file in sorted(files, key=lambda f: f.stat().st_mtime):
        events = EventAccumulator(str(file), size_guidance={SCALARS: 0})
        events.Reload()
        tags: Any = events.Tags()["scalars"]
        for tag in tags:
            series.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
    return {tag: dict(sorted(values.items())) for tag, values in sorted(series.items())}
