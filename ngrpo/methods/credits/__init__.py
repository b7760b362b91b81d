# SPDX-License-Identifier: Apache-2.0
"""How a response's advantage is shared among its tokens, for any perturbation and advantage: `--credit NAME`."""

from typing import TYPE_CHECKING

from perturbations.registry import Registry

if TYPE_CHECKING:
    from ngrpo.methods.credits.base import Credit as Credit

_FAMILIES = {
    "covariance": ("clip_cov", "kl_cov"),
    "token_credits": ("entropy_bonus", "first_token", "lp_reg", "simko", "top_entropy"),
}
registry = Registry("credit", f"{__name__}:Credit", __name__, "ngrpo.credits", _FAMILIES)
register = registry.register
available = registry.available
create = registry.create
__getattr__ = registry.base_of_package
