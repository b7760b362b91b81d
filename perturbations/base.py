# SPDX-License-Identifier: Apache-2.0
"""The contract of a perturbation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from perturbations import streams
from perturbations.edit import InputEdit
from perturbations.embeddings import ModelEmbeddings
from perturbations.gates.default import GateOptions
from perturbations.options import option
from perturbations.registry import perturbations
from perturbations.row_blocks import largest
from perturbations.step import Step


def input_gradient_option(default: str) -> Any:
    """The option ``input_gradient`` with a default of its own: ``none`` where the method's release feeds constants."""
    released = " (its release)" if default == "none" else ""
    return option(
        default,
        f"gradient of the fed inputs to the embedding: through the mixture, or none, as constants{released}",
        choices=("full", "none"),
    )


@dataclass(frozen=True)
class Proposal:
    """What a perturbation answers.

    Attributes:
        edit: the inputs at the B positions.
        tokens: the tokens that stand in the text there, (B,) int64: reward and PPO ratio read these.
        acts: where the perturbation acts at all, (B,) bool; None: everywhere. Elsewhere the position is an ordinary
            one and leaves no record; the edit there is the token's own embedding.
    """

    edit: InputEdit
    tokens: Int64[Tensor, " rows"]
    acts: Bool[Tensor, " rows"] | None = None


@dataclass(frozen=True)
class Replayed:
    """What the density side of a perturbation sees: N perturbed positions of a forward that replayed them.

    Attributes:
        logits: z̃ = z / temperature of all R rows of the forward, (R, V) float32, with gradient to the policy.
        rows: the row of ``logits`` that chose each position's token and input, (N,) int64.
        token_log_probs: log π of the tokens in the text there, (N,) float32, with gradient.
        temperature: the sampling temperature.
        edit: the inputs as recorded.
        noise_keys: (N,) int64, from which the recorded noise is drawn again; None where nothing is noisy.
        lookup: ids of any shape to their embeddings in the policy at hand, shape + (D,), with gradient.
        advantages: what the loss weighs each position's entry with, (N,) float32; None where there is no loss, as for
            old and reference policy. They may shape the gradient of a density and not its value, which all share.
        draw_keys: (N,) int64, from which the perturbation's own draws at these positions are drawn again.
        hidden: the last hidden state at each position's row, which the output layer made its logits of, (N, D) with
            gradient; None unless the perturbation's ``reads_hidden`` is True.
        module: the perturbation's parameters beside the model at hand; None where it has none.
    """

    logits: Float[Tensor, "forward vocabulary"]
    rows: Int64[Tensor, " positions"]
    token_log_probs: Float[Tensor, " positions"]
    temperature: float
    edit: InputEdit
    noise_keys: Int64[Tensor, " positions"] | None
    lookup: Callable[[Tensor], Tensor]
    advantages: Float[Tensor, " positions"] | None = None
    draw_keys: Int64[Tensor, " positions"] | None = None
    hidden: Float[Tensor, "positions hidden"] | None = None
    module: nn.Module | None = None

    def gumbel(self, ids: Tensor) -> Tensor:
        """The draws that ``step.gumbel(ids)`` gave in the rollout, (N, n) for ``ids`` (N, n).

        What follows from the draws alone is known from them exactly, whereas logits of rollout and trainer differ.

        Raises:
            ValueError: where there are no keys.
        """
        if self.draw_keys is None:
            raise ValueError("replayed positions without draw_keys: their draws cannot be repeated. Pass the keys.")
        return streams.gumbel(self.draw_keys, ids)

    def normal(self, ids: Tensor) -> Tensor:
        """The draws that ``step.normal(ids)`` gave in the rollout, (N, n), likewise."""
        if self.draw_keys is None:
            raise ValueError("replayed positions without draw_keys: their draws cannot be repeated. Pass the keys.")
        return streams.normal(self.draw_keys, ids)

    def at(self, ids: Tensor) -> Tensor:
        """z̃ of the tokens ``ids`` (N, n) at their positions, (N, n), with gradient."""
        return self.logits[self.rows.unsqueeze(-1), ids]

    def log_probs(self, ids: Tensor, temperature: float | None = None) -> Tensor:
        """log π of the tokens ``ids`` (N, n) among the whole vocabulary, (N, n), with gradient.

        Args:
            ids: (N, n) int64.
            temperature: that of π; None for the sampling temperature.
        """
        scale = 1.0 if temperature is None else self.temperature / temperature
        logits = self.logits if scale == 1.0 else self.logits * scale
        return scale * self.at(ids) - torch.logsumexp(logits, dim=-1)[self.rows].unsqueeze(-1)

    def top(self, k: int) -> Tensor:
        """The k likeliest tokens at each position, (N, k) int64."""
        with torch.no_grad():  # in slices: the rows' copies would be as large as the logits
            return torch.cat([largest(self.logits[part], k)[1] for part in self.rows.split(256)])


_LAST_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Perturbation(GateOptions, ABC):
    """A perturbation with its options. Subclasses are frozen dataclasses whose fields come from :func:`option`.

    A subclass implements :meth:`propose`, and overrides beyond that what it needs. The options of its gate, which
    says where it acts, are among its own.
    """

    kind = "perturbation"
    registry = perturbations
    paper: ClassVar[str] = "none named"
    mixture: ClassVar[str] = "convex"
    """What the weights of a position keep to: ``convex`` (none negative, sum 1), ``affine`` (sum 1) or ``free``."""
    module_options: ClassVar[tuple[str, ...]] = ()
    """Options that :meth:`module` depends on: saved parameters are refused where these differ."""
    reads_hidden: ClassVar[bool] = False
    """Whether :class:`Step` and :class:`Replayed` hold the last hidden states, which costs a hook."""

    perturb_eval: bool = option(False, "perturb evaluation rollouts too; the paper measured that this hurts")
    seed: int = option(0, "seed of the gate, the noise and the token draws", low=0, high=_LAST_SEED)
    input_gradient: str = input_gradient_option("full")
    freeze: str = option(
        "none", "what of the model does not train; tied matrices are one", choices=("none", "embedding", "head", "both")
    )

    @abstractmethod
    def propose(self, step: Step) -> Proposal:
        """The perturbed inputs and their tokens at B positions.

        Must be a function of each row alone (no mixing across the batch), use no randomness but the step's, and
        not synchronise with the host.

        Args:
            step: B positions.

        Returns:
            Edits, with the same number of candidates at every step, and the tokens (B,).
        """

    def prepare(self, embeddings: ModelEmbeddings) -> None:
        """Computes ahead what :meth:`propose` would ask of the embeddings on its first use.

        Called on a GPU alone: once the model is loaded, before its memory is profiled, and after each weight sync.
        """
        return None

    def module(self, hidden_size: int) -> nn.Module | None:
        """The learned parameters, for embeddings of D = ``hidden_size``; None where there are none.

        They live beside the model, train with it, are saved with it and follow each weight sync into the rollout:
        see `perturbations.parameters` for what the module must keep to.
        """
        return None

    def learning_rate(self, parameter: str) -> float | None:
        """Learning rate of a parameter of :meth:`module`, by its name there; None for the policy's own."""
        return None

    @property
    def has_parameters(self) -> bool:
        """Whether :meth:`module` gives learned parameters."""
        return self.module(1) is not None

    @property
    def has_density(self) -> bool:
        """Whether :meth:`log_density` takes the place of the tokens' log-probabilities in the loss.

        So it does where an option ``density`` names another than the token's.
        """
        return getattr(self, "density", "token") != "token"

    @property
    def density_of_vector(self) -> bool:
        """Whether :meth:`log_density` is of the fed vector itself, and not of draws of which the vector is a function.

        Then the vector is a fixed action, so the replay feeds it detached: its gradient to the embedding is the
        density's alone. And the ratio of two such densities in D dimensions is unbounded: see :attr:`score_only`.
        """
        return False

    @property
    def score_only(self) -> bool:
        """Whether :meth:`log_density` enters the loss in REINFORCE form, for one update at the policy that drew.

        Then its gradient counts, and its value is 0 for old, new and reference policy. So it must be where the noise
        is narrow beside the difference between the logits of rollout and trainer.
        """
        return self.density_of_vector

    @property
    def zero_mean_score(self) -> bool:
        """Whether the gradient of a perturbed position's entry in the loss has mean 0 over what is drawn there.

        So it is for a token that was drawn from the policy, and for the log-density of all that was drawn. Then a
        baseline is free: equal advantages for all answers move the policy nowhere. Elsewhere they push along the mean,
        whatever the reward.
        """
        return True

    @property
    def draws_text(self) -> bool:
        """Whether the token in the text follows from draws other than the request's own sampling.

        Where top-k, top-p or min-p of the request exclude it, the position stays an ordinary one; so what is left was
        drawn from another distribution than :meth:`log_density` says.
        """
        return False

    @property
    def draws_token(self) -> bool:
        """Whether the token in the text is drawn beside the input: then its log-probability is added to the density."""
        return False

    @property
    def samples_text(self) -> bool:
        """Whether the token in the text is ``step.sampled`` at every position, drawn from softmax(z̃) as without us.

        Importance weights π / π_rollout of the tokens are right there alone: a likeliest token, or the largest of
        noisy scores, was drawn from another distribution than the one that its recorded log-probability is of.
        """
        return False

    def log_density(self, replayed: Replayed) -> Tensor:
        """log π of the recorded inputs under the policy at hand, for old, new and reference policy alike.

        Terms in which the policy has no part may be left out, since they cancel in every ratio. N may be 0: on several
        ranks every one calls this method, so that all gather the same parameters.

        Args:
            replayed: N positions.

        Returns:
            (N,) float32, with gradient to the policy.
        """
        raise NotImplementedError(f"perturbation {self.name!r} has no density; has_density must be False then.")

    @property
    def active(self) -> bool:
        """Whether there is anything to do; where not, rollout and training are stock."""
        return self.rate > 0.0

    def check_model(self, vocabulary: int) -> None:
        """Raises ``UsageError`` where an option does not fit a model with so many tokens."""
