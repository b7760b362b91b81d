# SPDX-License-Identifier: Apache-2.0
"""``ngrpo check advantage``: does an advantage keep the contract of `ngrpo.methods.advantages.Advantage`?"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods import advantages
from ngrpo.methods.advantages.base import Advantage
from ngrpo.methods.second_rounds.base import SecondRound
from perturbations.errors import UsageError
from perturbations.testing import Check, PerturbationError, outcomes
from perturbations.testing.report import CLOSE, answered, check_answers, check_tensor, expect

_log = logging.getLogger(__name__)
_GROUP_SIZES = (8, 16, 32, 64, 128, 256)
_FRACTIONS = "rewards between 0 and 1"
_RIGHT_AND_WRONG = "right and wrong responses"


@dataclass(frozen=True)
class _Batch:
    """The arguments of :meth:`Advantage.compute`.

    Attributes:
        rewards: (prompts, responses).
        further: (prompts, responses) or (prompts, responses, ...): what else the advantage needs.
    """

    rewards: Tensor
    further: Tensor


def inspect(
    target: Advantage | type[Advantage] | str, kind: str = "advantage", **options: object
) -> Iterator[tuple[str, PerturbationError | None]]:
    """Checks an advantage, or its class or name with options, as :func:`perturbations.testing.inspect`."""
    return outcomes(target, advantages.registry, _checks, options)


def _checks(advantage: Advantage) -> Iterator[Check]:
    generator = torch.Generator().manual_seed(4)
    size = _group_size(advantage)
    rewards = torch.rand(7, size, generator=generator)
    further = _further(advantage, rewards, generator)
    rewards_by_label = {
        _RIGHT_AND_WRONG: (rewards > 0.5).float(),
        "groups all right or all wrong": (torch.arange(7).unsqueeze(-1) % 2.0).expand_as(rewards).clone(),
        _FRACTIONS: rewards,
    }
    try:
        advantage.check_rewards(rewards)
    except UsageError:  # made for right and wrong responses alone
        del rewards_by_label[_FRACTIONS]
    for number, (label, labelled_rewards) in enumerate(rewards_by_label.items()):
        batch = _Batch(rewards=labelled_rewards, further=further)
        yield Check(f"advantages of {label}", partial(_check, advantage, label, batch), needed=number == 0)
    if _accepts(advantage, size + 1):  # groups differ in size where responses are left out
        rewards = (torch.rand(7, size + 1, generator=generator) > 0.5).float()
        batch = _Batch(rewards=rewards, further=_further(advantage, rewards, generator))
        label = f"groups of {size + 1} responses"
        yield Check(f"advantages of {label}", partial(_check, advantage, label, batch))
    batch = _Batch(rewards=rewards_by_label[_RIGHT_AND_WRONG], further=further)
    yield Check("advantages other than 0", partial(_check_is_not_zero, advantage, batch))
    yield Check("the advantage at each training step", partial(_check_steps, advantage))
    yield Check("its flags of OpenRLHF, and what it warns of", partial(_check_flags, advantage))


def _further(advantage: Advantage, rewards: Tensor, generator: torch.Generator) -> Tensor:
    """What else the advantage needs, at random; zeros where it needs nothing."""
    numbers = torch.randint(1, 9, (*rewards.shape, 2), generator=generator).float()
    if advantage.needs == "counts":
        return numbers[..., 0]
    if advantage.needs == "values":
        return numbers[..., 0] / 9.0
    if advantage.needs == "log_probs":  # the log-probability of a response, and its number of tokens
        return numbers * torch.tensor([-1.0, 1.0])
    if advantage.needs == "hidden":
        return numbers
    return torch.zeros_like(rewards)


def _group_size(advantage: Advantage) -> int:
    """The smallest group size that the advantage accepts: some need more responses than their k."""
    for size in _GROUP_SIZES[:-1]:
        if _accepts(advantage, size):
            return size
    return _GROUP_SIZES[-1]


def _accepts(advantage: Advantage, size: int) -> bool:
    """Whether the advantage refuses no group of this size in words."""
    rewards = torch.zeros(1, size)
    try:
        _formula(advantage, rewards, _further(advantage, rewards, torch.Generator()))
    except UsageError:
        return False
    except Exception:  # for the checks to report
        pass
    return True


def _formula(advantage: Advantage, rewards: Tensor, further: Tensor) -> Tensor:
    """What :meth:`Advantage.compute` asks of a class, without its own check of the result."""
    advantage.check_rewards(rewards)
    return advantage.formula(rewards, further if advantage.needs else None)


def _check(advantage: Advantage, label: str, batch: _Batch) -> None:
    """Checks shape, dtype and values of the advantages of a batch, and that the same batch gives them again."""
    subject = f"{advantage.name}, {label}:"

    def compute(batch: _Batch) -> Tensor:
        advantages = answered(
            f"{subject} formula()",
            lambda: _formula(advantage, batch.rewards, batch.further),
            "It must accept any rewards in [0, 1], in groups of any size.",
        )
        check_tensor(
            f"{subject} what formula() returns",
            advantages,
            tuple(batch.rewards.shape),
            torch.float32,
            torch.device("cpu"),
        )
        not_finite = advantages[~torch.isfinite(advantages)].tolist()
        expect(
            not not_finite,
            f"{subject} formula() gives {not_finite[:1]}.",
            "Clamp before divisions: the rewards of a group may all be equal.",
        )
        _check_sizes(advantage, subject, advantages)
        return advantages

    check_answers(
        subject,
        "formula()",
        compute,
        batch,
        prefix="",
        draws="An advantage is a function of its rewards: it draws nothing.",
    )


def _check_is_not_zero(advantage: Advantage, batch: _Batch) -> None:
    """Logs a note where every advantage is 0: that breaks no promise, but a run would not change the policy."""
    try:
        is_zero = not _formula(advantage, batch.rewards, batch.further).any()
    except Exception:  # the check of this batch reports it
        return
    if is_zero:
        _log.warning(
            "%s: the advantages of right and wrong responses are all 0 in this check. If they are 0 in a run too, it"
            " does not change the policy.",
            advantage.name,
        )


def _check_sizes(advantage: Advantage, subject: str, advantages: Tensor) -> None:
    """What a class says of its advantages' size and sum is true: the clip of a run and its warnings follow from it."""
    largest_fix = (
        "Write largest(self, size): the largest |A| among that many responses. The start then widens the clip."
    )
    declared = answered(f"{subject} largest()", lambda: advantage.largest(advantages.shape[1]), largest_fix)
    size = advantages.abs().max().item()
    expect(
        advantage.normalized_over_step or size <= max(10.0, declared) * (1.0 + CLOSE),
        f"{subject} formula() gives |A| = {size:g}, which OpenRLHF clips to {max(10.0, declared):g}.",
        largest_fix,
    )
    total = advantages.sum(-1).abs().max().item()
    expect(
        not advantage.sums_to_zero or total <= 1e-3 * (1.0 + size),
        f"{subject} sums_to_zero is True, and the advantages of a group sum to {total:g}.",
        "Leave sums_to_zero at False.",
    )


def _check_steps(advantage: Advantage) -> None:
    """Some options change over the run, so an advantage is made again for each step, in the driver."""
    for step in (0, 1, 100, 100_000):
        where = f"{advantage.name}: at_step({step})"
        fix = "It must accept every training step, from 0 on: return self, or dataclasses.replace(self, ...)."
        later = answered(where, partial(advantage.at_step, step), fix)
        expect(isinstance(later, Advantage), f"{where} is a {type(later).__name__}.", fix)


def _check_flags(advantage: Advantage) -> None:
    """The flags and the notes, which a start asks for with the flags of the command line."""
    flags = Flags(["--rollout.n_samples_per_prompt", str(_group_size(advantage))])
    check_default_flags(advantage, flags)
    notes_fix = "It must give a list of texts, each a warning for the user; an empty one for none."
    notes = answered(f"{advantage.name}: notes()", partial(advantage.notes, flags), notes_fix)
    are_texts = isinstance(notes, list | tuple) and all(isinstance(note, str) for note in notes)
    expect(are_texts, f"{advantage.name}: notes() gives {notes!r:.200}.", notes_fix)


def check_default_flags(method: Advantage | SecondRound, flags: Flags) -> None:
    """The defaults of OpenRLHF's flags that belong to a method, in view of ``flags``."""
    fix = (
        "It must give flags, {'--algo.kl.init_coef': '0'}: their values as text, several as a tuple, None for a switch."
    )
    defaults = answered(f"{method.name}: flags()", partial(method.flags, flags), fix)
    are_flags = isinstance(defaults, dict) and all(_is_flag(name, value) for name, value in defaults.items())
    expect(are_flags, f"{method.name}: flags() gives {defaults!r:.200}.", fix)


def _is_flag(name: object, value: object) -> bool:
    """Whether a name is a flag's, with a text, several texts or, for a switch, None."""
    if not isinstance(name, str) or not name.startswith("--"):
        return False
    if isinstance(value, tuple) and value:
        return all(isinstance(text, str) for text in value)
    return value is None or isinstance(value, str)
