# SPDX-License-Identifier: Apache-2.0
"""iGRPO, Iterative Group Relative Policy Optimization: the best of several drafts is refined (arXiv 2602.09000)."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from ngrpo.machine.upstream.openrlhf_flags import Default, Flags
from ngrpo.machine.upstream.types import PreTrainedTokenizerBase
from ngrpo.methods.second_rounds import register
from ngrpo.methods.second_rounds.base import SecondRound, closing

_BEFORE = "An earlier attempt:"
_AFTER = "The attempt may be wrong. Solve the problem again, and better where you can."


@register("igrpo")
@dataclass(frozen=True, kw_only=True)
class IGRPO(SecondRound):
    """iGRPO: q′ = q ⊕ d*, with d* = argmax R(d_j) of G drafts d_j ~ π_old(· | q); GRPO on G refinements of q′.

    Drafts are not trained. Refinements o_i ~ π_old(· | q′) have A_i = (R(o_i) − mean R(o)) / std R(o), the ratio
    π_θ(o_i,t | q′, o_i,<t) / π_old(o_i,t | q′, o_i,<t) and the KL term at q′ (abstract, stages 1 and 2). The words
    around the draft and the choice among equally good drafts, at random, are ours.
    """

    paper = "iGRPO, arXiv 2602.09000"
    refines = True

    # Options of the base class that are constants here. There are as many responses as drafts.
    prompts: ClassVar[int] = 1  # type: ignore[bad-override]
    answers: ClassVar[int] = 0  # type: ignore[bad-override]
    shaping: ClassVar[None] = None  # type: ignore[bad-override]
    group: ClassVar[str] = "kept"  # type: ignore[bad-override]

    def flags(self, flags: Flags) -> dict[str, Default]:
        """No defaults: the KL term is part of the method."""
        return {}

    def is_needed(self, rewards: Sequence[float]) -> bool:
        """Always."""
        return True

    def prompt(
        self, text: str, tokenizer: PreTrainedTokenizerBase, random: Random, drafts: Sequence[tuple[str, float]] = ()
    ) -> str:
        """The prompt with the best of the drafts, a paragraph at the end of its last message."""
        best_reward = max(reward for _, reward in drafts)
        best_drafts = [draft for draft, reward in drafts if reward == best_reward]
        draft = random.choice(best_drafts)
        end = closing(text, tokenizer)
        return f"{text[:end]}\n\n{_BEFORE}\n\n{draft}\n\n{_AFTER}{text[end:]}"
