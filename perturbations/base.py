"""The contract of an operator."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from perturbations import registry, streams
from perturbations.edit import InputEdit
from perturbations.gates import Gate
from perturbations.geometry import Geometry
from perturbations.options import coerce, nearest, option


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

    def normal(self, n: int) -> Tensor:
        """(B, n) standard normal draws."""
        return streams.normal(self._keys(), n)

    def _keys(self) -> Tensor:
        return streams.keys(self.seeds, self.positions, streams.Stream.WEIGHTS)


@dataclass(frozen=True)
class Proposal:
    """What an operator answers.

    Attributes:
        edit: the inputs at the B positions.
        tokens: the tokens that stand in the text there, (B,) int64: reward and PPO ratio read these.
    """

    edit: InputEdit
    tokens: Tensor


@dataclass(frozen=True, kw_only=True)
class Perturbation(ABC):
    """An operator with its options. Subclasses are frozen dataclasses whose fields come from :func:`option`.

    The fields here belong to the gate, which all operators share. An operator overrides a default by declaring
    the field again.
    """

    name: ClassVar[str]
    paper: ClassVar[str]

    rate: float = option(1.0, "probability that a position is perturbed (the gate)", low=0.0, high=1.0)
    until: str | None = option("</think>", "stop for good once this text has been produced; 'none' for never")
    entropy_min: float | None = option(None, "perturb only where the entropy in nats is at least this", low=0.0)
    every: int = option(1, "perturb only every n-th generated position after the burn-in", low=1)
    burn_in: int = option(0, "leave the first n generated positions alone", low=0)
    protect: str | None = option(None, "never perturb these tokens: 'digits', or ids separated by commas")
    perturb_eval: bool = option(False, "perturb evaluation rollouts too; the paper measured that this hurts")
    seed: int = option(0, "seed of the gate, the noise and the token draws")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, coerce(type(self), field, getattr(self, field.name)))

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
    def active(self) -> bool:
        """Whether anything is ever perturbed; where not, rollout and training are stock."""
        return self.rate > 0.0

    @property
    def gate(self) -> Gate:
        """The gate of this operator."""
        return Gate(self.rate, self.until, self.entropy_min, self.every, self.burn_in, self.protect)

    def check_model(self, vocabulary: int) -> None:  # noqa: B027 (most operators fit any model)
        """Raises ``ValueError`` where an option does not fit a model with so many tokens."""

    def spec(self) -> dict[str, Any]:
        """Name and every option, as plain values: ``create(**spec)`` gives an equal operator."""
        return {
            "name": registry.address(type(self)),
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
        }

    def fingerprint(self) -> str:
        """The spec as canonical JSON, compared between processes."""
        return json.dumps(self.spec(), sort_keys=True)

    @classmethod
    def check_option_names(cls, names: list[str]) -> None:
        """Raises ``ValueError`` for a name that is not an option of this operator."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in names:
            if name not in known:
                raise ValueError(
                    f"perturbation {cls.name!r} has no option {name!r}.{nearest(name, known)}"
                    f" Its options: {', '.join(sorted(known))}."
                )
