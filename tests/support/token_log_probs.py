# SPDX-License-Identifier: Apache-2.0
"""A trainer's log-probabilities of its labels, as plainly as they can be written."""

from torch import Tensor


def log_probs_of(logits: Tensor, labels: Tensor) -> Tensor:
    """log π of each label: (…, V) and (…,) to (…,)."""
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)
