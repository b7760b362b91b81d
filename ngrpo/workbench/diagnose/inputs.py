# SPDX-License-Identifier: Apache-2.0
"""Perturbed inputs as vectors, and the token that each is nearest to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from perturbations import ReplayRecord
from perturbations.embeddings import ModelEmbeddings, nearest_tokens
from perturbations.replay.scope import ReplayScope

# More inputs than these tell no more: a share of them is known to 0.01 (one standard error).
_MOST = 2048


def recorded_inputs(
    record: ReplayRecord, rows: np.ndarray, embeddings: ModelEmbeddings, module: nn.Module | None
) -> Tensor:
    """The vectors that a rollout was fed at some perturbed positions, replayed as a training would.

    Args:
        record: of one trajectory.
        rows: which of the record's positions, (N,).
        embeddings: of the model that was fed.
        module: the perturbation's module, or None.

    Returns:
        (N, D) in the embedding's dtype.
    """
    embedding = nn.Embedding.from_pretrained(embeddings.matrix())
    tokens = torch.zeros(1, record.num_tokens, dtype=torch.int64, device=embedding.weight.device)
    positions = torch.from_numpy(record.positions[rows].astype(np.int64)).to(tokens.device)
    with torch.no_grad(), ReplayScope(embedding, measure=False, module=module)([record], None):
        return embedding(tokens)[0, positions]


@dataclass(frozen=True)
class FedInputs:
    """Where perturbed inputs lie among the embeddings; None where nothing was perturbed.

    Attributes:
        anchor_nearest: share whose nearest token is the anchor, the heaviest candidate: the likeliest token for a
            neighbor mixture, the token itself for noise around it.
        text_nearest: share whose nearest token is the one in the text.
        relative_shift: ‖e′ − E[x]‖ / ‖E[x]‖ with x the token in the text, mean; a training logs it as `shift`.
    """

    anchor_nearest: float | None = None
    text_nearest: float | None = None
    relative_shift: float | None = None


def measured(
    records: Sequence[ReplayRecord],
    texts: Sequence[Sequence[int]],
    embeddings: ModelEmbeddings,
    module: nn.Module | None,
) -> FedInputs:
    """Measures the perturbed inputs of answers; of many at most 2,048, evenly spaced over all answers.

    Args:
        records: of the answers.
        texts: the generated tokens of each answer.
        embeddings: of the model.
        module: the perturbation's module, or None.
    """
    perturbed = [(i, row) for i, record in enumerate(records) for row in range(len(record))]
    if not perturbed:
        return FedInputs()
    spaced = np.linspace(0, len(perturbed) - 1, min(_MOST, len(perturbed)))
    chosen = [perturbed[i] for i in np.unique(spaced.astype(int))]
    vectors, anchors, written = [], [], []
    for i, record in enumerate(records):
        rows = np.array([row for owner, row in chosen if owner == i], dtype=np.int64)
        if len(rows):
            vectors.append(recorded_inputs(record, rows, embeddings, module))
            anchors.extend(record.ids[rows, record.weights[rows].argmax(axis=1)].tolist())
            written.extend(texts[i][p - record.prompt_tokens] for p in record.positions[rows])
    stacked = torch.cat(vectors)
    own = torch.tensor(anchors, dtype=torch.int64, device=stacked.device)
    nearest = nearest_tokens(stacked, embeddings.matrix(), own)
    text = torch.tensor(written, dtype=torch.int64, device=stacked.device)
    plain = embeddings.matrix()[text].double()
    shifts = (stacked.double() - plain).norm(dim=-1) / plain.norm(dim=-1)
    same = [float((nearest == tokens).double().mean()) for tokens in (own, text)]
    return FedInputs(same[0], same[1], float(shifts.mean()))
