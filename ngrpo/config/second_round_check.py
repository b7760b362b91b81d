# SPDX-License-Identifier: Apache-2.0
"""``ngrpo check second_round``: the prompts of a second round, the responses that it keeps, and their weight.

Here the tokenizer is that of the small model `sandbox`, for which each word is a token. A start checks prompts of its
data with the tokenizer of its own model (`ngrpo/config/input_checks.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

import torch
from torch import Tensor

from ngrpo.config.advantage_check import check_default_flags
from ngrpo.machine.models import conversation, sandbox
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.machine.upstream.types import PreTrainedTokenizerBase
from ngrpo.methods.second_rounds.base import SecondRound
from perturbations.testing import Check
from perturbations.testing.report import answered, check_answers, check_tensor, expect, without_global_draws

_QUESTION = "What is the sum of 2 and 2 ?"
_GROUP = 4  # responses of the first round to a prompt
_SEEDS = range(20)  # of the prompts that are drawn
_DRAWS = "Take every draw from the argument `random`, and keep no state between calls."


@dataclass(frozen=True)
class _TokenLogProbs:
    """The arguments of :meth:`SecondRound.log_ratio`, (tokens,) float32 each."""

    log_probs: Tensor
    behavior: Tensor


def checks(method: SecondRound) -> Iterator[Check]:
    """The checks of a second round, beyond those of its class and options."""
    tokenizer = sandbox.tokenizer()
    messages = [{"role": "user", "content": _QUESTION}]
    rendered = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    without_template = sandbox.tokenizer()
    without_template.chat_template = None
    yield Check("prompts of plain text", partial(check_prompts, method, "plain text", _QUESTION, without_template))
    yield Check("prompts of a chat", partial(check_prompts, method, "a chat", rendered, tokenizer))
    yield Check("when it is needed", partial(_check_needed, method))
    if not method.refines:  # refinements replace all responses, whatever their rewards
        yield Check("the responses that it keeps", partial(_check_kept, method))
    yield Check("the weight of its responses", partial(_check_log_ratio, method))
    yield Check("its flags of OpenRLHF", partial(check_default_flags, method, Flags()))


def check_prompts(method: SecondRound, label: str, text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Each prompt is a text that follows from the draws, and not longer than the room for it.

    ``label``: of the data's prompt ``text``, for messages.
    """
    where = f"{method.name}, {label}:"
    drafts = [(f"draft {number}", float(number % 2)) for number in range(_GROUP)]
    arguments = {"drafts": drafts} if method.refines else {}

    def prompt(seed: int) -> str:
        call = partial(method.prompt, text, tokenizer, Random(seed), **arguments)
        made = answered(f"{where} prompt()", call, "It must accept any prompt, with or without a chat template.")
        expect(isinstance(made, str) and made.strip(), f"{where} prompt() gives {made!r:.200}.", "It must give a text.")
        return made

    prompts = without_global_draws(f"{where} prompt()", lambda: [prompt(seed) for seed in _SEEDS], _DRAWS)
    for seed, made in zip(_SEEDS, prompts):
        again = prompt(seed)
        expect(made == again, f"{where} prompt() gives {made!r:.100} and {again!r:.100} for the same draws.", _DRAWS)
    if method.refines:
        return
    room = answered(f"{where} room", lambda: method.room)
    expect(
        isinstance(room, int) and room >= 0,
        f"{where} room gives {room!r}.",
        "It must be the tokens that prompt() may add, a whole number, 0 or above.",
    )
    longest = max(prompts, key=partial(conversation.count_tokens, tokenizer))
    added = conversation.count_tokens(tokenizer, longest) - conversation.count_tokens(tokenizer, text)
    expect(
        added <= room,
        f"{where} prompt() adds {added} tokens, and room is {room}: {longest!r:.200}.",
        "Engines are started with as many tokens more: return the most that it may add, from the property room.",
    )


def _check_needed(method: SecondRound) -> None:
    where = f"{method.name}: is_needed()"
    for rewards in ([method.wrong] * _GROUP, [method.wrong + 1.0] * _GROUP, [method.wrong, method.wrong + 1.0]):
        needed = answered(where, partial(method.is_needed, rewards), "It must accept any rewards.")
        expect(isinstance(needed, bool), f"{where} gives {needed!r} for {rewards}.", "Return True or False.")


def _check_kept(method: SecondRound) -> None:
    """Responses of the second round replace some of the group's first ones, so a wrong one stays."""
    where = f"{method.name}: kept()"
    wrong = method.wrong
    right = wrong + 1.0
    for rewards in ([wrong] * 6, [wrong, right, wrong, right, wrong, wrong], [right] * 6):
        kept = answered(where, partial(method.kept, rewards, _GROUP, Random(1)), "It must accept any rewards.")
        allowed = [number for number, reward in enumerate(rewards) if reward > wrong]
        expect(
            isinstance(kept, list) and set(kept) <= set(allowed) and len(set(kept)) == len(kept) < _GROUP,
            f"{where} gives {kept!r:.200} for rewards {rewards} and a group of {_GROUP}.",
            f"It must be a list of at most {_GROUP - 1} different indices of right responses, here of {allowed}.",
        )
        again = method.kept(rewards, _GROUP, Random(1))
        expect(kept == again, f"{where} gives {kept} and {again} for the same draws.", _DRAWS)


def _check_log_ratio(method: SecondRound) -> None:
    """The weight of each token is finite, its own, and has a gradient."""
    where = f"{method.name}: log_ratio()"
    tokens = _TokenLogProbs(
        log_probs=torch.tensor([-0.0, -0.5, -1.0, -2.0, -40.0, -0.01, -7.0]),
        behavior=torch.tensor([-0.0, -0.5, -3.0, -1.0, -0.01, -40.0, -7.5]),
    )

    def log_ratio(tokens: _TokenLogProbs) -> Tensor:
        fix = "It must accept any log-probabilities."
        ratios = answered(where, lambda: method.log_ratio(tokens.log_probs, tokens.behavior), fix)
        shape = tuple(tokens.log_probs.shape)
        check_tensor(f"what {where} returns", ratios, shape, torch.float32, torch.device("cpu"))
        not_finite = ratios[~ratios.isfinite()].tolist()
        expect(not not_finite, f"{where} gives {not_finite[:1]}.", "Clamp before exponents and logarithms.")
        return ratios

    check_answers(f"{method.name}:", "log_ratio()", log_ratio, tokens, prefix="", draws="A ratio draws nothing.")
    log_probs = tokens.log_probs.clone().requires_grad_()
    ratios = log_ratio(_TokenLogProbs(log_probs, tokens.behavior))
    expect(
        ratios.requires_grad,
        f"{where} has no gradient of the policy's log-probabilities.",
        "Compute it from log_probs without .detach() or .item().",
    )
