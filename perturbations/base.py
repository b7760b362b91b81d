# SPDX-License-Identifier: Apache-2.0
"""The contract of a perturbation."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from perturbations import InputEdit, Proposal, Step, option, streams
from perturbations.embeddings import ModelEmbeddings
from perturbations.errors import require
from perturbations.gates.default import GateOptions
from perturbations.registry import perturbations
from perturbations.row_blocks import largest


def input_gradient_option(default: str) -> Any:
    """The option ``input_gradient``; its default is ``none`` where the method's release feeds constants."""
    released = " (its release)" if default == "none" else ""
    about = f"gradient of the fed inputs to the embedding: through the mixture, or none, as constants{released}"
    return option(default, about, choices=("full", "none"))


def density_option(others: str, *choices: str) -> Any:
    """The option ``density`` with default ``token``; ``others`` describes the further ``choices``."""
    return option("token", f"what the loss weighs: the token's probability, {others}", choices=("token", *choices))


def freeze_option(default: str, released: str = "") -> Any:
    """The option ``freeze``."""
    about = f"what of the model does not train; tied matrices are one{released}"
    return option(default, about, choices=("none", "embedding", "head", "both"))


@dataclass(frozen=True)
class Replayed:
    """The input of a density: N perturbed positions of a forward that replayed them, with gradient to the policy.

    ``advantages``, the weights in the loss, may affect the gradient of a density, not its value.
    """

    logits: Float[Tensor, "forward vocabulary"]  # z̃ = z / temperature of all rows of the forward
    rows: Int64[Tensor, " positions"]  # of ``logits``, that chose each position's token and input
    token_log_probs: Float[Tensor, " positions"]  # of the tokens in the text
    temperature: float  # of sampling
    edit: InputEdit  # the inputs as recorded
    noise_keys: Int64[Tensor, " positions"] | None  # of the recorded noise; None where nothing is noisy
    lookup: Callable[[Tensor], Tensor]  # ids of any shape to the policy's embeddings, shape + (D,)
    advantages: Float[Tensor, " positions"] | None = None  # None for old and reference policy, which have no loss
    draw_keys: Int64[Tensor, " positions"] | None = None  # of the perturbation's own draws
    hidden: Float[Tensor, "positions hidden"] | None = None  # the last hidden states; None without ``reads_hidden``
    module: nn.Module | None = None  # the policy's perturbation parameters, if any

    def gumbel(self, ids: Tensor) -> Tensor:
        """The rollout's ``step.gumbel(ids)``, (N, n): exact, whereas the logits of rollout and trainer differ."""
        return streams.gumbel(require(self.draw_keys, "draw_keys, without which no draw is repeated,"), ids)

    def normal(self, ids: Tensor) -> Tensor:
        """The rollout's ``step.normal(ids)``, as :meth:`gumbel`."""
        return streams.normal(require(self.draw_keys, "draw_keys, without which no draw is repeated,"), ids)

    def at(self, ids: Tensor) -> Tensor:
        """z̃ of the tokens ``ids`` (N, n) at their positions, (N, n), with gradient."""
        return self.logits[self.rows.unsqueeze(-1), ids]

    def log_probs(self, ids: Tensor, temperature: float | None = None) -> Tensor:
        """log π of the tokens ``ids`` (N, n) among all, (N, n), with gradient; None: at the sampling temperature."""
        scale = 1.0 if temperature is None else self.temperature / temperature
        logits = self.logits if scale == 1.0 else self.logits * scale
        return scale * self.at(ids) - torch.logsumexp(logits, dim=-1)[self.rows].unsqueeze(-1)

    def top(self, k: int) -> Tensor:
        """The k likeliest tokens at each position, (N, k) int64."""
        with torch.no_grad():  # in slices: the rows' copies would be as large as the logits
            return torch.cat([largest(self.logits[part], k)[1] for part in self.rows.split(256)])


@dataclass(frozen=True, kw_only=True)
class Perturbation(GateOptions, ABC):
    """A perturbation with its options, those of the default gate among them.

    Subclasses are frozen dataclasses with fields from :func:`option`. They implement :meth:`propose`.
    """

    kind = "perturbation"
    registry = perturbations
    paper: ClassVar[str] = "none named"
    # The weights of a position are convex (none negative, sum 1), affine (sum 1) or free.
    mixture: ClassVar[str] = "convex"
    # Options that module() depends on: saved parameters are refused where these differ.
    module_options: ClassVar[tuple[str, ...]] = ()
    # Whether Step and Replayed hold the last hidden states, which costs a hook.
    reads_hidden: ClassVar[bool] = False
    # Whether the token in the text follows from other draws than sampling's. A request's filters then bias the draws.
    draws_text: ClassVar[bool] = False

    perturb_eval: bool = option(False, "perturb evaluation rollouts too; the paper measured that this hurts")
    seed: int = option(0, "seed of the gate, the noise and the token draws", low=0, high=2**63 - 1)
    input_gradient: str = input_gradient_option("full")
    freeze: str = freeze_option("none")

    @abstractmethod
    def propose(self, step: Step) -> Proposal:
        """The perturbed inputs and the text's tokens at B positions, with the same number of candidates at every step.

        Each row must follow from that row alone, with no randomness but the step's, and without waiting for the device.
        """

    def prepare(self, embeddings: ModelEmbeddings) -> None:
        """Computes ahead what :meth:`propose` will need; called on a GPU only, after loading and each weight sync."""
        return None

    def module(self, hidden_size: int) -> nn.Module | None:
        """The learned parameters for embeddings of D = ``hidden_size``; contract: `perturbations.parameters`."""
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
        """Whether :meth:`log_density` is of the fed vector itself, which replay then feeds detached, not of draws."""
        return False

    @property
    def score_only(self) -> bool:
        """Whether only the gradient of :meth:`log_density` enters the loss (REINFORCE), as narrow noise needs."""
        return self.density_of_vector

    @property
    def zero_mean_score(self) -> bool:
        """Whether a perturbed position's gradient has mean 0 over the draws; else equal advantages push the policy."""
        return True

    @property
    def draws_token(self) -> bool:
        """Whether the token in the text is drawn in addition to the input: its log-probability joins the density."""
        return False

    @property
    def samples_text(self) -> bool:
        """Whether the token in the text is ``step.sampled`` at every position, which importance weights need."""
        return False

    def log_density(self, replayed: Replayed) -> Tensor:
        """log π of the recorded inputs at N positions under old, new or reference policy: (N,) float32, with gradient.

        Terms without the policy may be left out. N may be 0.
        """
        raise NotImplementedError(f"perturbation {self.name!r} has no density; has_density must be False then.")

    @property
    def active(self) -> bool:
        """Whether there is anything to do; otherwise rollout and training are upstream's."""
        return self.rate > 0.0

    def check_model(self, vocabulary: int) -> None:
        """Raises ``UsageError`` where an option does not fit a model with V = ``vocabulary``."""
