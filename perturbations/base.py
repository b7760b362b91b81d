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
    """The option ``input_gradient``; its default is ``none`` where the method's release feeds constants."""
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
        tokens: the tokens in the text there, (B,) int64: reward and PPO ratio read these.
        acts: where the perturbation acts, (B,) bool; None: everywhere. Elsewhere the position is unperturbed and
            leaves no record, and the edit is the token's own embedding.
    """

    edit: InputEdit
    tokens: Int64[Tensor, " rows"]
    acts: Bool[Tensor, " rows"] | None = None


@dataclass(frozen=True)
class Replayed:
    """The input of a density: N perturbed positions of a forward that replayed them.

    Attributes:
        logits: z̃ = z / temperature of all R rows of the forward, (R, V) float32, with gradient to the policy.
        rows: the row of ``logits`` that chose each position's token and input, (N,) int64.
        token_log_probs: log π of the tokens in the text there, (N,) float32, with gradient.
        temperature: the sampling temperature.
        edit: the inputs as recorded.
        noise_keys: (N,) int64, which give the recorded noise; None where nothing is noisy.
        lookup: ids of any shape to the policy's embeddings, shape + (D,), with gradient.
        advantages: each position's weight in the loss, (N,) float32; None for old and reference policy, which have no
            loss. They may affect the gradient of a density, not its value.
        draw_keys: (N,) int64, which give the perturbation's own draws.
        hidden: the last hidden state at each position's row, (N, D) with gradient, with ``reads_hidden``; else None.
        module: the policy's perturbation parameters; None where there are none.
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
        """The rollout's ``step.gumbel(ids)``, (N, n) for ``ids`` (N, n); ``ValueError`` without keys.

        They are exact, whereas the logits of rollout and trainer differ.
        """
        return streams.gumbel(self._own_keys(), ids)

    def normal(self, ids: Tensor) -> Tensor:
        """The rollout's ``step.normal(ids)``, as :meth:`gumbel`."""
        return streams.normal(self._own_keys(), ids)

    def _own_keys(self) -> Tensor:
        if self.draw_keys is None:
            raise ValueError("replayed positions without draw_keys: their draws cannot be repeated. Pass the keys.")
        return self.draw_keys

    def at(self, ids: Tensor) -> Tensor:
        """z̃ of the tokens ``ids`` (N, n) at their positions, (N, n), with gradient."""
        return self.logits[self.rows.unsqueeze(-1), ids]

    def log_probs(self, ids: Tensor, temperature: float | None = None) -> Tensor:
        """log π of the tokens ``ids`` (N, n) among the whole vocabulary, (N, n), with gradient.

        ``temperature``: that of π; None for the sampling temperature.
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

    A subclass implements :meth:`propose`, and may override the rest. The options of the default gate, which says where
    it acts, are among its own.
    """

    kind = "perturbation"
    registry = perturbations
    paper: ClassVar[str] = "none named"
    mixture: ClassVar[str] = "convex"
    """The weights of a position are ``convex`` (none negative, sum 1), ``affine`` (sum 1) or ``free``."""
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
        """The perturbed inputs and the text's tokens at B positions, with the same number of candidates at every step.

        Must be a function of each row alone (no mixing across the batch), use no randomness but the step's, and not
        synchronise with the host.
        """

    def prepare(self, embeddings: ModelEmbeddings) -> None:
        """Computes ahead what :meth:`propose` will ask of the embeddings.

        Called on a GPU only: once the model is loaded, before its memory is profiled, and after each weight sync.
        """
        return None

    def module(self, hidden_size: int) -> nn.Module | None:
        """The learned parameters, for embeddings of D = ``hidden_size``; None where there are none.

        They train with the model, are saved with it and follow each weight sync: `perturbations.parameters` has the
        module's contract.
        """
        return None

    def learning_rate(self, parameter: str) -> float | None:
        """Learning rate of a parameter of :meth:`module`, by its name; None for the policy's."""
        return None

    @property
    def has_parameters(self) -> bool:
        """Whether :meth:`module` gives learned parameters."""
        return self.module(1) is not None

    @property
    def has_density(self) -> bool:
        """Whether :meth:`log_density` replaces the tokens' log-probabilities in the loss; see option ``density``."""
        return getattr(self, "density", "token") != "token"

    @property
    def density_of_vector(self) -> bool:
        """Whether :meth:`log_density` is of the fed vector itself, not of draws that give the vector.

        Then the vector is a fixed action: the replay feeds it detached, and only the density has a gradient to the
        embedding. The ratio of two such densities in D dimensions is unbounded: see :attr:`score_only`.
        """
        return False

    @property
    def score_only(self) -> bool:
        """Whether :meth:`log_density` enters the loss in REINFORCE form, for one update at the policy that drew.

        Then only its gradient counts; its value is 0 for old, new and reference policy. Noise that is narrow compared
        to the logits' difference between rollout and trainer needs this.
        """
        return self.density_of_vector

    @property
    def zero_mean_score(self) -> bool:
        """Whether the gradient of a perturbed position's entry in the loss has mean 0 over the draws there.

        It does for a token drawn from the policy and for the log-density of everything drawn: equal advantages for all
        responses then move the policy nowhere. Otherwise they push along the mean, whatever the reward.
        """
        return True

    @property
    def draws_text(self) -> bool:
        """Whether the token in the text follows from draws other than the request's own sampling.

        Where the request's top-k, top-p or min-p exclude the token, the position stays unperturbed; the remaining
        draws have another distribution than :meth:`log_density` says.
        """
        return False

    @property
    def draws_token(self) -> bool:
        """Whether the token in the text is drawn besides the input, so that its log-probability joins the density."""
        return False

    @property
    def samples_text(self) -> bool:
        """Whether the token in the text is ``step.sampled`` at every position, drawn from softmax(z̃).

        Importance weights π / π_rollout of the tokens need this: the recorded log-probability of a likeliest token, or
        of the largest noisy score, is of another distribution than its own.
        """
        return False

    def log_density(self, replayed: Replayed) -> Tensor:
        """log π of the recorded inputs at N positions under old, new or reference policy: (N,) float32, with gradient.

        Terms without the policy may be left out, since they cancel in every ratio. N may be 0: every rank calls this
        method, so that all gather the same parameters.
        """
        raise NotImplementedError(f"perturbation {self.name!r} has no density; has_density must be False then.")

    @property
    def active(self) -> bool:
        """Whether there is anything to do; otherwise rollout and training are upstream's."""
        return self.rate > 0.0

    def check_model(self, vocabulary: int) -> None:
        """Raises ``UsageError`` where an option does not fit a model with V = ``vocabulary``."""
