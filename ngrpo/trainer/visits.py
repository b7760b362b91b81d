"""How often each (prompt, answer) outcome has been seen over a run: the N of COPO's count bonus."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_BOXED = "\\boxed{"


def answer_of(text: str) -> str:
    """The answer that a response gives, so that two ways to the same answer are one outcome.

    The content of the last ``\\boxed{…}``, else the last number, else the whole text in lower case with single
    spaces. What stands before ``</think>`` does not count.
    """
    text = text.rpartition("</think>")[2]
    boxed = _last_box(text)
    if boxed is not None:
        return "".join(boxed.split())
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else " ".join(text.lower().split())


def _last_box(text: str) -> str | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    start += len(_BOXED)
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


class Visits:
    """Counts of outcomes, kept by their hashes (8 bytes each) in the process that computes the advantages."""

    def __init__(self) -> None:
        self._seen: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """The number of different outcomes seen."""
        return len(self._seen)

    def visit(self, prompts: Sequence[str], responses: Sequence[str]) -> list[int]:
        """Counts a batch.

        Args:
            prompts: one per answer.
            responses: the generated texts.

        Returns:
            For each answer how often its outcome was seen before: in earlier batches, and by *other* answers of
            this batch. So equal answers get equal counts, in whatever order they stand.
        """
        keys = [
            hashlib.blake2b(f"{prompt}\0{answer_of(response)}".encode(), digest_size=8).digest()
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        self._seen.update(keys)
        return [self._seen[key] - 1 for key in keys]
