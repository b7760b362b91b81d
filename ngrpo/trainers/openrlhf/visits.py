# SPDX-License-Identifier: Apache-2.0
"""How often each (prompt, answer) outcome has been seen over a run: the N of COPO's count bonus."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from ngrpo.workbench.scoring.answers import outcome


class Visits:
    """Counts of outcomes, kept by their hashes (8 bytes each) in the process that computes the advantages."""

    def __init__(self) -> None:
        self._seen: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """The number of different outcomes seen."""
        return len(self._seen)

    def __repr__(self) -> str:
        return f"Visits of {len(self)} outcomes"  # OpenRLHF prints what a checkpoint holds

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
            hashlib.blake2b(f"{prompt}\0{outcome(response)}".encode(), digest_size=8).digest()
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        self._seen.update(keys)
        return [self._seen[key] - 1 for key in keys]
