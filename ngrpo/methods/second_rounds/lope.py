# SPDX-License-Identifier: Apache-2.0
"""LoPE, Lorem Perturbation for Exploration: nonsense before the prompt, and its paper's baseline (arXiv 2605.05566)."""

from dataclasses import dataclass
from random import Random

from ngrpo.machine.upstream.types import PreTrainedTokenizerBase
from ngrpo.methods.second_rounds import register
from ngrpo.methods.second_rounds.base import SecondRound, opening
from perturbations import UsageError, option

# The words of the printers' dummy text, which is cut out of Cicero's De finibus (45 BC).
_TEXT = (
    "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt ut labore et dolore magna"
    " aliqua enim ad minim veniam quis nostrud exercitation ullamco laboris nisi aliquip ex ea commodo consequat duis"
    " aute irure in reprehenderit voluptate velit esse cillum eu fugiat nulla pariatur excepteur sint occaecat"
    " cupidatat non proident sunt culpa qui officia deserunt mollit anim id est laborum"
)
WORDS = tuple(_TEXT.split())
# Tokens that the line's end may add, and the tokenizer where the text before and after meets the nonsense.
_SEAMS = 8


@register("lope")
@dataclass(frozen=True, kw_only=True)
class LoPE(SecondRound):
    """LoPE: random words of *lorem ipsum*, a line of their own at the beginning of the prompt's first message."""

    paper = "LoPE, arXiv 2605.05566"

    least: int = option(100, "the shortest nonsense, in tokens", low=1)
    most: int = option(300, "the longest nonsense, in tokens", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.most:
            raise UsageError(
                f"second round lope: least={self.least}: must be in [1, {self.most}], up to most. Lower it."
            )

    @property
    def room(self) -> int:
        """The longest nonsense, and the tokens that its line may add."""
        return self.most + _SEAMS

    def prompt(self, text: str, tokenizer: PreTrainedTokenizerBase, random: Random) -> str:
        """Nonsense of a length drawn from [least, most], a line of its own at the opening of the prompt."""
        length = random.randint(self.least, self.most)
        words = [random.choice(WORDS) for _ in range(length)]
        # The most words, at least one, that fit into so many tokens, by bisection.
        low = 1
        high = length
        while low < high:
            middle = (low + high + 1) // 2
            tokens = tokenizer.encode(" ".join(words[:middle]), add_special_tokens=False)
            if len(tokens) <= length:
                low = middle
            else:
                high = middle - 1
        nonsense = " ".join(words[:low])
        start = opening(text, tokenizer)
        return f"{text[:start]}{nonsense}\n{text[start:]}"


@register("repeat")
@dataclass(frozen=True, kw_only=True)
class Repeat(SecondRound):
    """Further responses to the same prompt."""

    paper = "a baseline of LoPE, arXiv 2605.05566"

    prompts: int = option(1, "how often the prompt is sampled again", low=1)
    answers: int = option(24, "responses to it each time", low=1)

    def prompt(self, text: str, tokenizer: PreTrainedTokenizerBase, random: Random) -> str:
        """The prompt, unchanged."""
        return text
