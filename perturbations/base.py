"""The contract of an operator."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from perturbations import streams
from perturbations.edit import InputEdit
from perturbations.gates import Gate, Places, Schedule
from perturbations.geometry import Geometry
from perturbations.options import Options, option
from perturbations.registry import gates, operators


@dataclass(frozen=True)
class Step:
    """What an operator sees: the B positions that the gate's draw selected, as one batch on one device.

    Attributes:
        logits: z̃ = z / temperature, (B, V) float32, before any top-k, top-p or min-p.
        sampled: the tokens that ordinary sampling chose, (B,) int64.
        temperature: the sampling temperature, (B,) float32; 1 for a greedy request.
        seeds: trajectory seeds, (B,) int64.
        positions: positions that the tokens take in their trajectories, (B,) int64.
        geometry: the model's embeddings and neighbor indices.
    """

    logits: Tensor
    sampled: Tensor
    temperature: Tensor
    seeds: Tensor
    positions: Tensor
    geometry: Geometry

    def uniform(self, n: int | Tensor) -> Tensor:
        """(B, n) uniform draws in (0, 1), the same wherever and whenever the position is computed.

        Args:
            n: draws per position; or token ids (B, n), which ties each draw to its token. Noise on a ranked list of
                candidates must be tied so: two near-equal logits swap ranks under float rounding.
        """
        return streams.uniform(self._keys(), n)

    def gumbel(self, n: int | Tensor) -> Tensor:
        """(B, n) Gumbel(0, 1) draws; ``n`` as in :meth:`uniform`."""
        return streams.gumbel(self._keys(), n)

    def normal(self, n: int | Tensor) -> Tensor:
        """(B, n) standard normal draws; ``n`` as in :meth:`uniform`."""
        return streams.normal(self._keys(), n)

    def log_gamma(self, ids: Tensor, shape: Tensor) -> Tensor:
        """(B, n) logarithms of Gamma(shape, 1) draws, tied to the tokens ``ids`` (B, n); ``shape`` (B, n)."""
        return streams.log_gamma(self._keys(), ids, shape)

    def _keys(self) -> Tensor:
        return streams.keys(self.seeds, self.positions, streams.Stream.WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class GateStep(Step):
    """What a gate sees: as :class:`Step`, with draws of its own.

    Attributes:
        generated: tokens that each answer has so far, (B,) int64: 0 for its first position.
    """

    generated: Tensor

    @classmethod
    def of(cls, step: Step, generated: Tensor) -> GateStep:
        """A gate's view of an operator's step."""
        return cls(**{f.name: getattr(step, f.name) for f in dataclasses.fields(step)}, generated=generated)

    def _keys(self) -> Tensor:
        return streams.keys(self.seeds, self.positions, streams.Stream.GATE_OPEN)


@dataclass(frozen=True)
class Proposal:
    """What an operator answers.

    Attributes:
        edit: the inputs at the B positions.
        tokens: the tokens that stand in the text there, (B,) int64: reward and PPO ratio read these.
    """

    edit: InputEdit
    tokens: Tensor


@dataclass(frozen=True)
class Replayed:
    """What the density side of an operator sees: N perturbed positions of a forward that replayed them.

    Attributes:
        logits: z̃ = z / temperature of all R rows of the forward, (R, V) float32, with gradient to the policy.
        rows: the row of ``logits`` that chose each position's token and input, (N,) int64.
        token_log_probs: log π of the tokens in the text there, (N,) float32, with gradient.
        temperature: the sampling temperature.
        edit: the inputs as recorded.
        noise_keys: (N,) int64, from which the recorded noise is drawn again; None where nothing is noisy.
        lookup: ids of any shape to their embeddings in the policy at hand, shape + (D,), with gradient.
    """

    logits: Tensor
    rows: Tensor
    token_log_probs: Tensor
    temperature: float
    edit: InputEdit
    noise_keys: Tensor | None
    lookup: Callable[[Tensor], Tensor]

    def at(self, ids: Tensor) -> Tensor:
        """z̃ of the tokens ``ids`` (N, n) at their positions, (N, n), with gradient."""
        return self.logits[self.rows.unsqueeze(-1), ids]

    def top(self, k: int) -> Tensor:
        """The k likeliest tokens at each position, (N, k) int64."""
        with torch.no_grad():  # in slices: the rows' copies would be as large as the logits
            return torch.cat([self.logits[part].topk(k, dim=-1).indices for part in self.rows.split(256)])


@dataclass(frozen=True, kw_only=True)
class Perturbation(Options, ABC):
    """A perturbation with its options. Subclasses are frozen dataclasses whose fields come from :func:`option`.

    The fields here say where an operator acts, and all operators share them. An operator overrides a default by
    declaring the field again.
    """

    kind = "perturbation"
    registry = operators
    paper: ClassVar[str] = "none named"
    mixture: ClassVar[str] = "convex"
    """What the weights of a position keep to: ``convex`` (none negative, sum 1), ``affine`` (sum 1) or ``free``."""
    module_options: ClassVar[tuple[str, ...]] = ()
    """Options that :meth:`module` depends on: saved parameters are refused where these differ."""

    rate: float = option(1.0, "probability that a position is perturbed (the gate)", low=0.0, high=1.0)
    until: str | None = option("</think>", "stop for good once this text has been produced; 'none' for never")
    entropy_min: float | None = option(None, "perturb only where the entropy in nats is at least this", low=0.0)
    every: int = option(1, "perturb only every n-th generated position after the burn-in", low=1)
    burn_in: int = option(0, "leave the first n generated positions alone", low=0)
    protect: str | None = option(None, "never perturb these tokens: 'digits', or ids separated by commas")
    gate: str | Gate | None = option(None, "perturb only where this gate, too, is open: its name", registry=gates)  # noqa: RUF009
    perturb_eval: bool = option(False, "perturb evaluation rollouts too; the paper measured that this hurts")
    seed: int = option(0, "seed of the gate, the noise and the token draws")

    @abstractmethod
    def propose(self, step: Step) -> Proposal:
        """The perturbed inputs and their tokens at B positions.

        Must be a function of each row alone (no mixing across the batch), use no randomness but the step's, and
        not synchronise with the host.

        Args:
            step: B positions.

        Returns:
            Edits with at most :attr:`candidates` candidates per position, and the tokens (B,).
        """

    @property
    @abstractmethod
    def candidates(self) -> int:
        """K, the number of candidates of each edit."""

    @property
    def noisy(self) -> bool:
        """Whether edits carry a noise scale σ."""
        return False

    @property
    def dense(self) -> bool:
        """Whether edits carry vectors of their own: 4·D bytes of record per position, without gradient to E."""
        return False

    def module(self, hidden_size: int) -> nn.Module | None:
        """The operator's learned parameters, for embeddings of D = ``hidden_size``; None where it has none.

        They live beside the model, train with it, are saved with it and follow each weight sync into the rollout:
        see `perturbations.parameters` for what the module must keep to.
        """
        return None

    def learning_rate(self, parameter: str) -> float | None:
        """Learning rate of a parameter of :meth:`module`, by its name there; None for the policy's own."""
        return None

    @property
    def keeps_total(self) -> bool:
        """Whether edits carry ``total``: 4 bytes of record per position."""
        return False

    @property
    def has_density(self) -> bool:
        """Whether :meth:`log_density` takes the place of the tokens' log-probabilities in the loss."""
        return False

    @property
    def density_of_vector(self) -> bool:
        """Whether :meth:`log_density` is of the fed vector itself, and not of draws of which the vector is a function.

        Then the vector is a fixed action, so the replay feeds it detached: its gradient to the embedding is the
        density's alone. And the ratio of two such densities in D dimensions is unbounded, so the density enters the
        loss in REINFORCE form: its gradient counts, and its value is 0 for old, new and reference policy.
        """
        return False

    @property
    def draws_token(self) -> bool:
        """Whether the token in the text is drawn beside the input: then its log-probability is added to the density."""
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

    def plan(self, seed: int, first: int, length: int, start: int = 0) -> np.ndarray:
        """Which positions the draw, the schedule and the gate's own plan select; as :meth:`Schedule.plan`."""
        selected = Schedule(self.rate, self.every, self.burn_in).plan(seed, first, length, start)
        at = np.flatnonzero(selected)
        if self.gate is not None and len(at):
            selected[at] = self.gate.plan(Places(seed, first, at + start))
        return selected

    def check_model(self, vocabulary: int) -> None:
        """Raises ``UsageError`` where an option does not fit a model with so many tokens."""
