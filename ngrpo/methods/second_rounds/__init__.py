# SPDX-License-Identifier: Apache-2.0
"""A second round of responses to a prompt: `ngrpo train --second_round NAME`.

It makes the prompts of the second round. Where all responses of the first are wrong, right responses to these replace
wrong ones, and are trained as responses to the data's prompt; or responses to the best draft replace all.
"""

from typing import TYPE_CHECKING

from perturbations.registry import Registry

if TYPE_CHECKING:
    from ngrpo.methods.second_rounds.base import SecondRound as SecondRound

registry = Registry(
    "second round", f"{__name__}:SecondRound", __name__, "ngrpo.second_rounds", {"lope": ("lope", "repeat")}
)
register, available, create = registry.register, registry.available, registry.create
__getattr__ = registry.base_of_package
