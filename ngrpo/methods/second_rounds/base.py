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

_MARKER = "ngrpo-text"  # stands for a message's text, to find where the chat template puts it


@dataclass(frozen=True, kw_only=True)
class SecondRound(Options, ABC):
    """A second round with its options. Subclasses are frozen dataclasses with fields from ``option``."""

    kind: ClassVar[str] = "second round"
    registry: ClassVar[Any] = _registry
    paper: ClassVar[str] = "none named"
    refines: ClassVar[bool] = False
    """Whether its prompt shows a draft, a response of the first round. The responses to it, as many as in the first
    round, are then trained instead, with that prompt and the ordinary ratio."""

    prompts: int = option(6, "new prompts made from each prompt whose responses are all wrong", low=1)
    answers: int = option(4, "responses to each new prompt", low=1)
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
        """Defaults of OpenRLHF's flags that belong to the method, here no KL term; ``flags`` are those given so far."""
        return {"--algo.kl.init_coef": "0"}

    def is_needed(self, rewards: Sequence[float]) -> bool:
        """Whether all responses to a prompt are wrong, by their rewards."""
        return max(rewards) <= self.wrong

    def kept(self, rewards: Sequence[float], size: int, random: Random) -> list[int]:
        """The indices of the second round's right responses that replace the group's first ones.

        There are at most G − 1 (G = ``size``), so that a wrong response stays; ``random`` chooses among more.
        ``rewards`` are those of the second round.
        """
        right = [number for number, reward in enumerate(rewards) if reward > self.wrong]
        if len(right) < size:
            return right
        return sorted(random.sample(right, size - 1))

    def log_ratio(self, log_probs: Tensor, behavior: Tensor) -> Tensor:
        """The logarithm of the advantage's weight, for each token of a response of the second round.

        ρ = π_θ(o | p) / π_old(o | p′), p of the data and p′ of the second round; ρ / (ρ + γ) with shaping.
        ``log_probs`` and ``behavior`` are the logarithms of these probabilities, of one shape.
        """
        log_ratio = log_probs - behavior
        if self.shaping is None:
            return log_ratio
        # log(ρ / (ρ + γ)) = −log(1 + γ / ρ) = −softplus(log γ − log ρ)
        log_shaping = torch.tensor(self.shaping).log().to(log_ratio)
        return -torch.nn.functional.softplus(log_shaping - log_ratio)


def closing(prompt: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """The index in a prompt at which the text of its last message ends.

    Its length where the tokenizer's chat template, if any, did not make the prompt.
    """
    if not getattr(tokenizer, "chat_template", None):
        return len(prompt)
    message = {"role": "user", "content": _MARKER}
    # The text that the template puts behind a user's message is searched for; where that is only white space, together
    # with the response's opening (add_generation_prompt).
    for add_generation_prompt in (False, True):
        with suppress(Exception):  # a template may raise anything
            text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=add_generation_prompt)
            _, _, end = str(text).partition(_MARKER)
            if end.strip() and end in prompt:
                return prompt.rindex(end)
    return len(prompt)


def opening(prompt: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """The index in a prompt at which the text of its first message (the system's or the user's) begins.

    0 where the tokenizer's chat template, if any, did not make the prompt.
    """
    if not getattr(tokenizer, "chat_template", None):
        return 0
    user = {"role": "user", "content": _MARKER}
    system = {"role": "system", "content": _MARKER}
    longest_head = 0
    # Without a system message a template may write one of its own, so that the head before the user's text is longer.
    for messages in ([user], [system, user]):
        with suppress(UsageError):  # a template may fail for roles that it does not know
            head, marker, _ = rendered(tokenizer, messages).partition(_MARKER)
            if marker and prompt.startswith(head):
                longest_head = max(longest_head, len(head))
    return longest_head
