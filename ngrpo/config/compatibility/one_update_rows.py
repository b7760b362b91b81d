# SPDX-License-Identifier: Apache-2.0
"""What a feature refuses for which a rollout is used for one update, at the policy that drew it."""

from ngrpo.config import features
from ngrpo.config.compatibility.row import Row
from ngrpo.config.feature_kinds import Feature, flag, other_than


def one_update_rows(feature: Feature, *, why: str, otherwise: str = "") -> list[Row]:
    """The rows of a feature.

    Args:
        feature: that refuses.
        why: the reason, a clause that ends with "one update at the policy that drew it".
        otherwise: what else mends each pair, with which its ``fix`` ends: ``, or add --perturbation.density token``.
    """
    return [
        Row(
            what=flag("--train.async_enable"),
            conflicts_with=feature,
            why=why,
            fix=f"leave it out{otherwise}",
        ),
        Row(
            what=other_than("--train.max_epochs", "1"),
            conflicts_with=feature,
            why=why,
            fix=f"set --train.max_epochs 1{otherwise}",
        ),
        Row(
            what=features.SMALL_BATCH,
            conflicts_with=feature,
            why=why,
            fix=f"set --train.batch_size to these samples{otherwise}",
        ),
        Row(
            what=features.NOISE,
            conflicts_with=feature,
            why=f"{why}, not at weights without the noise",
            fix=f"leave one of them out{otherwise}",
        ),
    ]
