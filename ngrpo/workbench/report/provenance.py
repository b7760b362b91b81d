# SPDX-License-Identifier: Apache-2.0
"""How the result was made: enough to do it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from ngrpo.workbench.report.values import MISSING, dig, rows

_FACTS = ("versions", "machine", "sampling")
_STRATEGY = ("perturbation", "base", "settings", "paper")


def made(source: Mapping[str, Any]) -> dict[str, Any]:
    """Command, machine, versions, seeds and specs of a comparison or a diagnosis."""
    facts = []
    for key in _FACTS:
        section = dig(source, key)
        if isinstance(section, Mapping) and section:
            facts.append((key.capitalize(), {str(name): _plain(value) for name, value in section.items()}))
    strategies = {
        str(row.get("id", row.get("name"))): {key: row[key] for key in _STRATEGY if key in row}
        for row in rows(source, "strategies")
    }
    quoted = {
        "Command": source.get("command"),
        "Strategies: perturbation and settings": strategies,
        "Seeds": list(dict.fromkeys(str(run.get("seed")) for run in rows(source, "runs"))),
        "Flags of OpenRLHF shared by all": source.get("openrlhf_args"),
    }
    return {"facts": facts, "quoted": [(title, _quoted(value)) for title, value in quoted.items() if value]}


def _quoted(value: object) -> str:
    words = isinstance(value, list)
    return shlex.join(map(str, value)) if words else json.dumps(value, indent=1, ensure_ascii=False)


def _plain(value: object) -> Any:
    if value is None:
        return MISSING
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
