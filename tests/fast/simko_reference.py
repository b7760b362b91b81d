# SPDX-License-Identifier: Apache-2.0
"""SimKO's loss by its paper's formula, on a small batch."""

import torch
from torch import Tensor

B, T, A, V = 3, 7, 5, 11

LENGTHS = [(1, 7), (0, 6), (1, 7)]  # first and last real token of each row: padded on the left and on the right

ACTIONS = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])

ADVANTAGES = torch.tensor([1.3, -0.7, -0.6]).unsqueeze(1).expand(B, A).contiguous()


def reference(logits: Tensor, ids: Tensor, old: Tensor, k: int, alpha: float, penalty: float, q: float) -> Tensor:
    """The paper's objective, written with its own ratios, token by token; gradients stop where it says sg."""
    losses = []
    for b in range(B):
        of_answer = [t for t in range(A) if ACTIONS[b, t]]
        steps = [T - 1 - A + t for t in of_answer]
        log_p = logits[b, steps].log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1).detach()
        ordered = entropy.sort().values.tolist()
        place = q * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        threshold = ordered[low] + (place - low) * (ordered[high] - ordered[low])
        for row, t, h in zip(log_p, of_answer, entropy.tolist()):
            y, a = int(ids[b, T - A + t]), float(ADVANTAGES[b, t])
            gamma = (row[y] - old[b, t]).exp()
            if h > threshold and a > 0:
                best = row.detach().argsort(descending=True)[:k]
                # Any old probabilities of the candidates: they cancel.
                of_k = (row[best] + torch.linspace(0.5, 2.0, k)).exp()
                gamma = (1 - alpha) * gamma + alpha / k * ((gamma / of_k).detach() * of_k).sum()
            elif h > threshold and a < 0 and y == int(row.argmax()):
                a *= penalty
            losses.append(-torch.minimum(gamma * a, gamma.clamp(0.8, 1.2) * a))
    return torch.stack(losses).mean()
