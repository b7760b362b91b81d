# SPDX-License-Identifier: Apache-2.0
"""The reward of the recipes: 1 where math-verify finds an answer equal to its label, else 0."""

from ngrpo.methods.tasks.math import reward_func

__all__ = ["reward_func"]
