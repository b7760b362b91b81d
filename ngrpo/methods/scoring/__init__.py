# SPDX-License-Identifier: Apache-2.0
"""Problems with their references, and the verdict on a response."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

RIGHT = "right"
WRONG = "wrong"
UNREADABLE = "unreadable"
TIMED_OUT = "timed_out"


@dataclass(frozen=True)
class Problem:
    """A question for a model.

    Attributes:
        id: unique in its set, and the same in every run.
        messages: the chat, without a generation prompt, as `conversation.normalised` gives it; the last has a text.
        answer: the reference; empty only where the scorer needs none.
        scorer: ``math``, ``choice``, ``reasoning_gym``, ``task:NAME``, or a Python file with ``reward_func``.
        meta: further JSON values for the scorer or for people.
        template: arguments of the chat template, the problem's tools among them.
    """

    id: str
    messages: tuple[dict[str, Any], ...]
    answer: str
    scorer: str
    meta: dict[str, Any] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """The text of the last message, for people."""
        return self.messages[-1]["content"]


def digest(problems: Sequence[Problem]) -> str:
    """A short hash of everything that determines the samples of some problems and their scores."""
    rows = []
    for problem in problems:
        row: list[Any] = [problem.id, list(problem.messages), problem.answer, problem.scorer]
        if problem.template:  # a set without template arguments has the digest of releases that knew none
            row.append(problem.template)
        rows.append(row)
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Verdict:
    """A scorer's judgement of one response.

    Attributes:
        verdict: ``right``, ``wrong``, ``unreadable`` (no final answer was found) or ``timed_out``.
        reward: in [0, 1] for the built-in scorers; a user's file may give any number.
        extracted: the final answer in canonical form: equal answers give equal strings (1/2, 0.5 and \\frac{1}{2});
            None where none was found.
    """

    verdict: str
    reward: float = 0.0
    extracted: str | None = None

    @classmethod
    def of(cls, right: bool, extracted: str | None, reward: float | None = None) -> Verdict:
        """Right, wrong, or unreadable where a wrong answer has no ``extracted``; the reward is 1 or 0 unless given."""
        verdict = WRONG
        if right:
            verdict = RIGHT
        elif extracted is None:
            verdict = UNREADABLE
        return cls(verdict, float(right) if reward is None else reward, extracted)

    @property
    def correct(self) -> bool:
        """Whether the response counts as right in Mean@n and Pass@k."""
        return self.verdict == RIGHT

    @property
    def parsed(self) -> bool:
        """Whether a final answer was found."""
        return self.extracted is not None

    def columns(self) -> dict[str, Any]:
        """The verdict in a line of ``samples.jsonl``."""
        return {**asdict(self), "correct": self.correct, "parsed": self.parsed}
