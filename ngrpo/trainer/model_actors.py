"""OpenRLHF's actor and reference with replay: every forward sees what the rollout saw.

Each function takes a class or method of OpenRLHF 0.11.2 and returns what takes its place: a row of
`ngrpo.trainer.seams`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ngrpo.trainer import sidecar
from ngrpo.trainer.metrics import SHIFT_COUNT, SHIFT_SUM
from perturbations.replay_scope import ReplayScope


def input_embedding(model: Any) -> torch.nn.Module:
    """The input embedding under OpenRLHF's ``Actor`` and DeepSpeed's engine."""
    model = model.model
    while hasattr(model, "module"):
        model = model.module
    return model.get_input_embeddings()


def replaying_actor(plain: type) -> type:
    """`PolicyModelActor`: its log-probabilities (the "old" ones of PPO) are those of the replayed history."""
    return _replaying_forward(plain, "actor")


def replaying_reference(plain: type) -> type:
    """`ReferenceModelActor`: the same history, through its own embedding."""
    return _replaying_forward(plain, "model")


def _replaying_forward(plain: type, attribute: str) -> type:
    """A subclass whose ``forward`` replays; ``attribute`` holds the model."""

    class ReplayingModelActor(plain):  # type: ignore[misc, valid-type]
        def forward(self, sequences: Any, action_mask: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
            records = sidecar.records(kwargs.get("mm_train_inputs_list"), len(sequences))
            embedding = input_embedding(getattr(self, attribute))
            with ReplayScope(embedding, measure=False)(records, attention_mask):
                return super().forward(sequences, action_mask, attention_mask, **kwargs)

    return ReplayingModelActor


def replaying_training_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """`ActorPPOTrainer.training_step`: the forward that is differentiated replays too.

    The scope covers the backward as well, so that a checkpointed forward that runs again sees the same inputs.
    """

    def training_step(self: Any, experience: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        records = sidecar.records(experience.mm_train_inputs, len(experience.sequences))
        loss_fn, ratios = self.actor_loss_fn, _RatioProbe(self.actor_loss_fn)
        self.actor_loss_fn = ratios
        try:
            with ReplayScope(input_embedding(self.actor))(records, experience.attention_mask) as stats:
                result = original(self, experience, *args, **kwargs)
        finally:
            self.actor_loss_fn = loss_fn
        result["metrics"]["perturbation/ratio_mean"] = ratios.mean
        result["weights"]["perturbation/ratio_mean"] = "token"
        # Sums per sample, which OpenRLHF averages over samples: their quotient is the mean over perturbed positions,
        # however the positions fall into micro-batches (see metrics.reported_step).
        batch = len(experience.sequences)
        result["metrics"][SHIFT_SUM] = torch.tensor(stats.shift_sum() / batch)
        result["metrics"][SHIFT_COUNT] = torch.tensor(stats.count() / batch)
        result["weights"][SHIFT_SUM] = result["weights"][SHIFT_COUNT] = "sample"
        return result

    return training_step


class _RatioProbe:
    """Calls the policy loss and notes the mean of the PPO ratio π_new / π_old over the generated tokens."""

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        self._loss_fn = loss_fn
        self.mean = torch.tensor(1.0)

    def __call__(self, log_probs: Any, old_log_probs: Any, *args: Any, action_mask: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            ratio = (log_probs - old_log_probs).float().exp()
            self.mean = (ratio * action_mask).sum() / action_mask.sum().clamp_min(1)
        return self._loss_fn(log_probs, old_log_probs, *args, action_mask=action_mask, **kwargs)
