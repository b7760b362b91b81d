# SPDX-License-Identifier: Apache-2.0
"""A few answers side by side, token by token, with what was fed in place of the perturbed ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ngrpo.machine.console.text import fed_texts, token_texts
from ngrpo.workbench.diagnose.sample import Sample

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike

    from ngrpo.workbench.evaluate import Problem

QUESTIONS = 3


def side_by_side(
    problems: Sequence[Problem], groups: Mapping[str, Sequence[Sequence[Sample]]], tokenizer: TokenizerLike
) -> list[dict[str, Any]]:
    """``samples`` of diagnosis.json: the first questions, and each strategy's first answer, drawn with the same noise.

    Args:
        problems: the P problems.
        groups: strategy id to its P groups.
        tokenizer: of the model.
    """
    return [
        {
            "problem": problem.messages[-1]["content"],
            "answer": problem.answer,
            "by_strategy": [
                {
                    "strategy": name,
                    "reward": strategy_groups[i][0].reward,
                    "tokens": _tokens(strategy_groups[i][0], tokenizer),
                }
                for name, strategy_groups in groups.items()
            ],
        }
        for i, problem in enumerate(problems[:QUESTIONS])
    ]


def _tokens(sample: Sample, tokenizer: TokenizerLike) -> list[dict[str, Any]]:
    record = sample.record
    row_of = {} if record is None else {p - record.prompt_tokens: i for i, p in enumerate(record.positions.tolist())}
    result = []
    for index, text in enumerate(token_texts(sample.tokens, tokenizer)):
        token: dict[str, Any] = {"text": text, "perturbed": index in row_of}
        if index in row_of:
            token |= fed_texts(record, row_of[index], tokenizer)
        result.append(token)
    return result
