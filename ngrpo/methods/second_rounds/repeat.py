# SPDX-License-Identifier: Apache-2.0
"""The same prompt once more: what LoPE's paper compares its prompts with (arXiv 2605.05566)."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from ngrpo.methods.second_rounds import register
from ngrpo.methods.second_rounds.base import SecondRound
from perturbations.options import option


@register("repeat")
@dataclass(frozen=True, kw_only=True)
class Repeat(SecondRound):
    """Further answers to the same prompt."""

    paper = "a baseline of LoPE, arXiv 2605.05566"

    prompts: int = option(1, "how often the prompt is asked again", low=1)
    answers: int = option(24, "answers to it each time", low=1)

    def prompt(self, text: str, tokenizer: Any, random: Random) -> str:
        """The given one."""
        return text
