# SPDX-License-Identifier: Apache-2.0
"""The contract of a second round."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor

from ngrpo.machine.models.conversation import rendered
from ngrpo.machine.upstream.openrlhf_flags import Default, Flags
from ngrpo.machine.upstream.types import PreTrainedTokenizerBase
from ngrpo.methods.second_rounds import registry as _registry
from perturbations.errors import UsageError
from perturbations.options import Options, option

_TEXT = "ngrpo-text"


@dataclass(frozen=True, kw_only=True)
class SecondRound(Options, ABC):
    """A second round with its options. Subclasses are frozen dataclasses with fields from ``option``."""

    kind: ClassVar[str] = "second round"
    registry: ClassVar[Any] = _registry
    paper: ClassVar[str] = "none named"
    refines: ClassVar[bool] = False
    """Whether its prompt shows a draft, a response of the first round. The responses to it, as many as in the first
    round, are then trained instead, with that prompt and the ordinary ratio."""

    prompts: int = option(6, "prompts that are sampled again when all responses to one are wrong", low=1)
    answers: int = option(4, "responses to each of them", low=1)
    wrong: float = option(0.0, "the largest reward of a wrong response")
    shaping: float | None = option(0.1, "γ of the ratio ρ / (ρ + γ); none for PPO's, ρ clipped", above=0.0)
    group: str = option("all", "rewards that advantages compare: of all responses, or kept", choices=("all", "kept"))
    seed: int = option(0, "seed of the prompts and of the choice among right responses", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refines and (self.prompts, self.group) != (1, "kept"):
            raise UsageError(
                f"second round {self.name!r}: refines=True with prompts={self.prompts} and group={self.group!r}; must"
                " be 1 and 'kept', since refinements of one draft are trained and compared with one another. Write"
                f" prompts: ClassVar[int] = 1 and group: ClassVar[str] = 'kept' into {type(self).__qualname__}."
            )

    @abstractmethod
    def prompt(self, text: str, tokenizer: PreTrainedTokenizerBase, random: Random) -> str:
        """A prompt of the second round, at most :attr:`room` tokens longer than ``text``, the data's prompt.

        ``tokenizer``: the model's, of transformers; its chat template has the run's arguments. ``random``: the source
        of all draws. A method that :attr:`refines` has a further argument ``drafts``, texts and rewards of the first
        round; ``--data.max_len`` is its room.
        """

    @property
    def room(self) -> int:
        """Tokens by which a prompt may be longer than the given one; engines are started with as many more."""
        return 0

    def flags(self, flags: Flags) -> dict[str, Default]:
        """Defaults of OpenRLHF's flags that belong to the method: no KL term, in view of the others."""
        return {"--algo.kl.init_coef": "0"}

    def is_needed(self, rewards: Sequence[float]) -> bool:
        """Whether all responses to a prompt are wrong, by their rewards."""
        return max(rewards) <= self.wrong

    def kept(self, rewards: Sequence[float], size: int, random: Random) -> list[int]:
        """Which responses of the second round, by their rewards, replace the group's first ones: right ones only.

        At most G − 1 of them (G = ``size``), so that a wrong response stays; ``random`` chooses.
        """
        right = [number for number, reward in enumerate(rewards) if reward > self.wrong]
        return right if len(right) < size else sorted(random.sample(right, size - 1))

    def log_ratio(self, log_probs: Tensor, behavior: Tensor) -> Tensor:
        """The logarithm of the advantage's weight, for each token of a response of the second round.

        ρ = π_θ(o | p) / π_old(o | p′), p of the data and p′ of the second round; ρ / (ρ + γ) with shaping.
        ``log_probs`` and ``behavior`` are the logarithms of these probabilities, of one shape.
        """
        ratio = log_probs - behavior
        if self.shaping is None:
            return ratio
        return -torch.nn.functional.softplus(torch.tensor(self.shaping).log().to(ratio) - ratio)


def closing(prompt: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """The index in a prompt at which the text of its last message ends.

    Its length where the tokenizer's chat template, if any, did not make the prompt.
    """
    # What ends a message; if that is white space, the opening of the response.
    for opened in (False, True) if getattr(tokenizer, "chat_template", None) else ():
        with suppress(Exception):
            message = {"role": "user", "content": _TEXT}
            text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=opened)
            end = str(text).partition(_TEXT)[2]
            if end.strip() and end in prompt:
                return prompt.rindex(end)
    return len(prompt)


def opening(prompt: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """The index in a prompt at which the text of its first message (the system's or the user's) begins.

    0 where the tokenizer's chat template, if any, did not make the prompt.
    """
    if not getattr(tokenizer, "chat_template", None):
        return 0
    lengths, user = [0], {"role": "user", "content": _TEXT}
    # A template may put a system message of its own in front of the user's: then the longer head is meant.
    for messages in ([user], [{"role": "system", "content": _TEXT}, user]):
        with suppress(UsageError):  # a template may fail for roles that it does not know
            head, found, _ = rendered(tokenizer, messages).partition(_TEXT)
            lengths += [len(head)] if found and prompt.startswith(head) else []
    return max(lengths)
