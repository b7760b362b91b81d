# SPDX-License-Identifier: Apache-2.0
"""A second round of responses to a prompt: `ngrpo train --second_round NAME`.

A method makes the prompts of the second round. There are two kinds of methods. With the first kind, a second round
follows where all responses of the first are wrong. Right responses to the new prompts then replace wrong ones, and are
trained as responses to the data's prompt. With the second kind, the new prompt shows the best response of the first
round, a draft, and the responses to it replace all of the first round.
"""

from typing import TYPE_CHECKING

from perturbations.registry import Registry

if TYPE_CHECKING:
    from ngrpo.methods.second_rounds.base import SecondRound as SecondRound

registry = Registry(
    "second round", f"{__name__}:SecondRound", __name__, "ngrpo.second_rounds", {"lope": ("lope", "repeat")}
)
register = registry.register
available = registry.available
create = registry.create
__getattr__ = registry.base_of_package
