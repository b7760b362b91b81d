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
from perturbations.token_log_probs import log_probs_at


def input_gradient_option(default: str) -> Any:
    """The option ``input_gradient``; its default is ``none`` where the method's release feeds constants."""
    help_text = "how fed inputs pass gradient to the embedding: full, through the mixture; none, as constants"
    if default == "none":
        help_text += " (its release)"
    return option(default, help_text, choices=("full", "none"))


def density_option(description: str, *choices: str) -> Any:
    """The option ``density`` with default ``token``; ``description`` is of the further ``choices``."""
    help_text = f"whose probability the loss weighs: the token's, {description}"
    return option("token", help_text, choices=("token", *choices))


def freeze_option(default: str, released: str = "") -> Any:
    """The option ``freeze``; ``released`` ends its help, such as `` (its release: both)``."""
    help_text = f"which matrices do not train; tied ones count as one{released}"
    return option(default, help_text, choices=("none", "embedding", "head", "both"))


@dataclass(frozen=True)
class Replayed:
    """The input of a density: N perturbed positions of a forward that replayed them, with gradient to the policy.

    Attributes:
        logits: z̃ = z / temperature of all R rows of the forward, (R, V).
        rows: the row of ``logits`` that chose each position's token and input.
        token_log_probs: log π of the tokens in the text.
        temperature: the sampling temperature.
        edit: the inputs as recorded.
        noise_keys: keys that give the recorded noise ε again; None where no input has noise.
        lookup: maps ids of any shape to the policy's embeddings, shape + (D,).
        advantages: the positions' weights in the loss; None for the old and the reference policy, which have no loss.
            They may affect the gradient of a density, not its value.
        draw_keys: keys that give the perturbation's own draws again.
        hidden: the last hidden states; None without ``reads_hidden``.
        module: the policy's perturbation parameters, if any.
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
        return log_probs_at(self.logits, self.rows, ids, scale)

    def top(self, k: int) -> Tensor:
        """The k likeliest tokens at each position, (N, k) int64."""
        # In slices of 256 rows, since indexing copies them: a copy of all rows would be as large as the logits.
        ids_of_slices = []
        with torch.no_grad():
            for rows in self.rows.split(256):
                _, ids = largest(self.logits[rows], k)
                ids_of_slices.append(ids)
            return torch.cat(ids_of_slices)


@dataclass(frozen=True, kw_only=True)
class Perturbation(GateOptions, ABC):
    """A perturbation with its options, those of the default gate among them.

    Subclasses are frozen dataclasses with fields from :func:`option`. They implement :meth:`propose`.
    """

    kind = "perturbation"
    registry = perturbations
    paper: ClassVar[str] = "none named"
    # The weights of a position are convex (none is negative, they sum to 1), affine (they sum to 1) or free.
    mixture: ClassVar[str] = "convex"
    # The options that module() depends on. Saved parameters are refused where the value of one of these differs.
    module_options: ClassVar[tuple[str, ...]] = ()
    # Whether Step and Replayed hold the last hidden states, which needs a hook on the model's output layer.
    reads_hidden: ClassVar[bool] = False
    # Whether noise chooses the token in the text, with a probability that has no formula. A request's top-k, top-p and
    # min-p then bias the choice: where they exclude the chosen token, the position stays unperturbed.
    draws_text: ClassVar[bool] = False

    perturb_eval: bool = option(False, "perturb evaluation rollouts too")
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
        # Any hidden size tells; a module may divide it, as a low-rank one does.
        return type(self).module is not Perturbation.module and self.module(64) is not None

    @property
    def has_density(self) -> bool:
        """Whether :meth:`log_density` replaces the tokens' log-probabilities in the loss; see option ``density``."""
        return getattr(self, "density", "token") != "token"

    @property
    def density_of_vector(self) -> bool:
        """Whether :meth:`log_density` is the density of the fed vector, and not of draws that the vector is made from.

        Replay then feeds the vector as a constant: only its density has a gradient.
        """
        return False

    @property
    def score_only(self) -> bool:
        """Whether only the gradient of :meth:`log_density` enters the loss (REINFORCE), as narrow noise needs."""
        return self.density_of_vector

    @property
    def zero_mean_score(self) -> bool:
        """Whether the loss's gradient at a perturbed position has mean 0 over the draws, as that of a log-density has.

        Where it has not, advantages that are equal for all responses still change the policy.
        """
        return True

    @property
    def draws_token(self) -> bool:
        """Whether the token in the text is drawn in addition to the input: its log-probability joins the density."""
        return False

    @property
    def samples_text(self) -> bool:
        """Whether the token in the text is ``step.sampled`` at every position, which importance weights need."""
        return False

    @property
    def has_text_probabilities(self) -> bool:
        """Whether :meth:`text_probabilities` has a formula."""
        return type(self).text_probabilities is not Perturbation.text_probabilities

    def text_probabilities(self, logits: Tensor, temperature: float, left: Tensor) -> Tensor:
        """The probability of each token to be drawn for the text at N perturbed positions: (N, V) float32.

        For score centering, which needs it of a perturbation that draws the text's token itself.

        Args:
            logits: z̃ = z / temperature, before top-k, top-p and min-p, (N, V).
            temperature: the sampling temperature.
            left: which tokens top-k, top-p and min-p left, (N, V) bool.
        """
        raise NotImplementedError(f"perturbation {self.name!r}: the probabilities of its text have no formula.")

    def log_density(self, replayed: Replayed) -> Tensor:
        """log π of the recorded inputs at N positions under old, new or reference policy: (N,) float32, with gradient.

        Terms without the policy may be left out. N may be 0.
        """
        raise NotImplementedError(f"perturbation {self.name!r} has no density; has_density must be False then.")

    @property
    def active(self) -> bool:
        """Whether any position can be perturbed.

        An engine may draw seeded tokens and record masks or experts also where none can.
        """
        return self.rate > 0.0

    def check_model(self, vocabulary: int) -> None:
        """Raises ``UsageError`` where an option does not fit a model with V = ``vocabulary``."""
