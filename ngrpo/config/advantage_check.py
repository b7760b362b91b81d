# SPDX-License-Identifier: Apache-2.0
"""``ngrpo check advantage``: does an advantage keep the contract of `ngrpo.methods.advantages.Advantage`?"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.methods import advantages
from ngrpo.methods.advantages.base import Advantage
from perturbations.errors import UsageError
from perturbations.testing import PerturbationError, outcomes
from perturbations.testing.report import answered, check_answers, check_tensor, require

_GROUPS = (8, 16, 32, 64, 128, 256)
_FRACTIONS = "rewards between 0 and 1"
_NO_DRAWS = "An advantage is a function of its rewards: it draws nothing."


@dataclass(frozen=True)
class _Batch:
    """What an advantage is given: (P, G) each."""

    rewards: Tensor
    further: Tensor


def inspect(
    target: Advantage | type[Advantage] | str, kind: str = "advantage", **options: object
) -> Iterator[tuple[str, PerturbationError | None]]:
    """Checks an advantage, or its class or name with options, as :func:`perturbations.testing.inspect`."""
    return outcomes(target, advantages.registry, _checks, options)


def _checks(advantage: Advantage) -> Iterator[tuple[str, Callable[[], None]]]:
    draws = torch.Generator().manual_seed(4)
    rewards = torch.rand(7, _group_size(advantage), generator=draws)
    further = _further(advantage, rewards, draws)
    labelled = {
        "right and wrong responses": (rewards > 0.5).float(),
        "groups all right or all wrong": (torch.arange(7).unsqueeze(-1) % 2.0).expand_as(rewards).clone(),
        _FRACTIONS: rewards,
    }
    try:
        advantage.check_rewards(rewards)
    except UsageError:  # made for right and wrong responses alone
        del labelled[_FRACTIONS]
    for label, values in labelled.items():
        yield f"advantages of {label}", partial(_check, advantage, label, _Batch(values, further))
    yield "the advantage at each training step", partial(_check_steps, advantage)
    yield "its flags of OpenRLHF, and what it warns of", partial(_check_flags, advantage)


def _further(advantage: Advantage, rewards: Tensor, draws: torch.Generator) -> Tensor:
    """What else the advantage needs, at random; zeros where it needs nothing."""
    numbers = torch.randint(1, 9, (*rewards.shape, 2), generator=draws).float()
    choices = {"counts": numbers[..., 0], "log_probs": numbers * torch.tensor([-1.0, 1.0]), "hidden": numbers}
    choices["values"] = numbers[..., 0] / 9.0
    return choices.get(advantage.needs, torch.zeros_like(rewards))


def _group_size(advantage: Advantage) -> int:
    """The smallest that the advantage is made for: some need more responses than their k."""
    for size in _GROUPS[:-1]:
        try:
            advantage.compute(torch.zeros(1, size), _further(advantage, torch.zeros(1, size), torch.Generator()))
        except UsageError:
            continue
        except Exception:  # for the checks to report
            pass
        return size
    return _GROUPS[-1]


def _check(advantage: Advantage, label: str, batch: _Batch) -> None:
    where, fix = f"{advantage.name}, {label}:", "It must accept any rewards in [0, 1]."

    def answer(given: _Batch) -> Tensor:
        advantages = answered(f"{where} formula()", lambda: advantage.compute(given.rewards, given.further), fix)
        subject, shape = f"{where} what formula() returns", tuple(given.rewards.shape)
        check_tensor(subject, advantages, shape, torch.float32, torch.device("cpu"))
        broken = advantages[~torch.isfinite(advantages)].tolist()
        may_be_equal = "Clamp before divisions: the rewards of a group may all be equal."
        require(not broken, f"{where} formula() gives {broken[:1]}.", may_be_equal)
        return advantages

    check_answers(where, "formula()", answer, batch, prefix="", draws=_NO_DRAWS)


def _check_steps(advantage: Advantage) -> None:
    """Some options change over the run, so an advantage is made again for each step, in the driver."""
    for step in (0, 1, 100, 100_000):
        where = f"{advantage.name}: at_step({step})"
        fix = "It must accept every training step, from 0 on: return self, or dataclasses.replace(self, ...)."
        later = answered(where, partial(advantage.at_step, step), fix)
        require(isinstance(later, Advantage), f"{where} is a {type(later).__name__}.", fix)


def _check_flags(advantage: Advantage) -> None:
    """Asked before a training starts, with the flags that it was given."""
    flags = Flags(["--rollout.n_samples_per_prompt", str(_group_size(advantage))])
    fix = (
        "It must give flags, {'--algo.kl.init_coef': '0'}: their values as text, several as a tuple, None for a switch."
    )
    defaults = answered(f"{advantage.name}: flags()", partial(advantage.flags, flags), fix)
    wrong = not isinstance(defaults, dict)
    for name, value in () if wrong else defaults.items():
        texts = value if isinstance(value, tuple) and value else (value,)
        fits = value is None or all(isinstance(part, str) for part in texts)
        wrong |= not (fits and isinstance(name, str) and name.startswith("--"))
    require(not wrong, f"{advantage.name}: flags() gives {defaults!r:.200}.", fix)
    fix = "It must give a list of texts, each a warning for the user; an empty one for none."
    notes = answered(f"{advantage.name}: notes()", partial(advantage.notes, flags), fix)
    texts = isinstance(notes, list | tuple) and all(isinstance(note, str) for note in notes)
    require(texts, f"{advantage.name}: notes() gives {notes!r:.200}.", fix)
