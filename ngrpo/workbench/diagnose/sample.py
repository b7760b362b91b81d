# SPDX-License-Identifier: Apache-2.0
"""One sampled answer and what was measured of it, as a line of ``samples.jsonl``."""

from __future__ import annotations

import base64
from dataclasses import dataclass, fields
from typing import Any

from ngrpo.workbench.evaluate.engine import Sampling
from perturbations.errors import UsageError
from perturbations.replay import ReplayRecord


@dataclass(frozen=True)
class GroupSampling(Sampling):
    """How the answers of a group are drawn, the same for every strategy; ``group`` is how many."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    group: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group < 2:
            raise UsageError(f"group={self.group}: must be at least 2: diversity is between the answers of a group.")


@dataclass(frozen=True)
class Sample:
    """An answer of one strategy.

    Attributes:
        strategy: the strategy's id.
        problem: the problem's id.
        group: which of the prompts, from 0.
        member: which answer of its group, from 0.
        text: without special tokens: what the scorer read.
        tokens: all that were generated, the end token included.
        ended: whether the model ended the answer (its last token is then the end token), not the length limit.
        reward: of the scorer.
        correct: whether it counts as right.
        extracted: the final answer in canonical form, or None.
        parsed: whether a final answer was found.
        nll: -log p of the tokens under the unperturbed model at temperature 1, summed, in nats.
        record: what was fed in place of the tokens, or None for an unperturbed strategy.
    """

    strategy: str
    problem: str
    group: int
    member: int
    text: str
    tokens: list[int]
    ended: bool
    reward: float
    correct: bool
    extracted: str | None
    parsed: bool
    nll: float
    record: ReplayRecord | None

    @property
    def answer_tokens(self) -> list[int]:
        """The tokens without the one that ended the answer."""
        return self.tokens[:-1] if self.ended else self.tokens

    @property
    def perturbed(self) -> list[int]:
        """Places among ``tokens`` whose input was perturbed, from 0."""
        if self.record is None:
            return []
        positions = self.record.positions.astype(int) - self.record.prompt_tokens
        return [position for position in positions.tolist() if 0 <= position < len(self.tokens)]

    def to_json(self) -> dict[str, Any]:
        """A line of ``samples.jsonl``; the record is base64 of :meth:`ReplayRecord.to_bytes`."""
        packed = None if self.record is None else base64.b64encode(self.record.to_bytes()).decode()
        return {**vars(self), "perturbed": self.perturbed, "record": packed}

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Sample:
        """Reads what :meth:`to_json` wrote."""
        values: dict[str, Any] = {field.name: line[field.name] for field in fields(cls)}
        packed = values["record"]
        values["record"] = packed and ReplayRecord.from_bytes(base64.b64decode(packed))
        return cls(**values)
