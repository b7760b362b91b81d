# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's actor as far as a density's patch meets it."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.density_model import Model, hooked

TEMPERATURE = 0.7


class Language(Model):
    """The small model with Hugging Face's name for its embedding."""

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


class Actor(nn.Module):
    """What OpenRLHF's Actor does, without a transformer."""

    temperature = TEMPERATURE

    def __init__(self) -> None:
        super().__init__()
        self.model = Language()

    def forward(self, sequences: Tensor, action_mask: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.model(sequences) / self.temperature
        labels = torch.roll(sequences, -1, 1)
        log_probs = hooked(logits, labels)[:, :-1]
        return log_probs[:, -action_mask.shape[1] :] * action_mask


class PolicyModelActor:
    def __init__(self) -> None:
        self.actor = self.model = Actor()

    def forward(self, sequences: Any, action_mask: Any, attention_mask: Any, mm_train_inputs_list: Any = None) -> Any:
        with torch.no_grad():
            return self.actor(sequences, action_mask, attention_mask)
