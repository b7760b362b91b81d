# SPDX-License-Identifier: Apache-2.0
"""The requests of a simulation, their logits, and an engine without a model: a perturber with the parts of a worker."""

import random
import zlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cuda_without_gpu.pretended import Pretended, host_values
from ngrpo.rollout.input_override import InputOverride
from ngrpo.rollout.output_layer import OutputLayer
from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.requests import RunningRequests
from ngrpo.rollout.sampling_support import SamplingMaskStore
from ngrpo.rollout.step_graphs import rows_of_buffers
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations import registry
from perturbations.base import Perturbation
from perturbations.embeddings import ModelEmbeddings
from perturbations.gates.default import BoundGate

HIDDEN = 16


@dataclass(frozen=True)
class Plan:
    """How requests are run.

    Attributes:
        seed: of the requests and of the scheduler.
        lag: how many steps later a copy arrives.
        preempted: probability that a request is preempted in a step.
        chunk: positions of a prompt computed at once.
        batch: requests at once.
        masked: whether the tokens that filters left are recorded.
        sampling: ``all``, ``filtered`` (the 40 likeliest), or ``greedy`` (every other request).
        vocabulary: V; not a multiple of 64, so that the last block of a row is filled up.
        dtype: of the embeddings and, where nothing filters, of the logits.
        shuffled: whether requests change rows and miss steps; else a batch keeps decoding in its order.
        output_layer: whether logits come from last hidden states, by an output layer that a graph may run.
    """

    seed: int = 1
    lag: int = 0
    preempted: float = 0.0
    chunk: int = 7
    batch: int = 4
    masked: bool = False
    sampling: str = "all"
    vocabulary: int = 200
    dtype: torch.dtype = torch.float32
    shuffled: bool = True
    output_layer: bool = False


@dataclass
class Request:
    """A request as the scheduler has it.

    Attributes:
        name: of the request.
        prompt: its tokens.
        most: tokens to generate.
        seed: of the trajectory.
        tokens: the prompt and what was generated.
        computed: how many of the tokens have been in a forward since the start or the last preemption.
        opened: whether the engine knows the request.
        preempted: whether the request comes back as a new one.
        parameters: what vLLM would hand over.
    """

    name: str
    prompt: list[int]
    most: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    opened: bool = False
    preempted: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.parameters = SimpleNamespace(extra_args={"perturbation": {"seed": self.seed}}, seed=None)


def requests_of(plan: Plan, count: int) -> list[Request]:
    draws = random.Random(plan.seed)
    requests = []
    for number in range(count):
        prompt = draws.choices(range(plan.vocabulary), k=draws.randrange(1, 12))
        most = draws.randrange(1, 20)
        requests.append(Request(name=f"r{number}-{number:08d}", prompt=prompt, most=most, seed=7 * number + 1))
    return requests


def logits_of(name: str, position: int, last_token: int, plan: Plan) -> Tensor:
    """Random logits, (V,), that follow from the request, the position and the last token."""
    return (_random(name, position, last_token, plan.vocabulary) * 3).to(plan.dtype)


def last_hidden_of(name: str, position: int, last_token: int, plan: Plan) -> Tensor:
    """A random last hidden state, (D,), in the same way; its logits have a standard deviation of 3."""
    return (_random(name, position, last_token, HIDDEN) * 3 / HIDDEN**0.5).to(plan.dtype)


def _random(name: str, position: int, last_token: int, size: int) -> Tensor:
    seed = zlib.crc32(f"{name} {position} {last_token}".encode())
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


class Head(nn.Module):
    """A model with an output layer only, each row of which has the same bits in a batch of any size."""

    def __init__(self, weight: Tensor) -> None:
        """weight: (V, D)."""
        super().__init__()
        self.weight = weight

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Last hidden states (B, D) to logits (B, V), with the strides of vLLM's padded vocabulary."""
        vocabulary = len(self.weight)
        logits = (hidden.unsqueeze(1) * self.weight).sum(dim=-1)
        return nn.functional.pad(logits, (0, -vocabulary % 64))[:, :vocabulary]


class Engine:
    """A perturber with the parts of one worker, and no model."""

    def __init__(self, perturbation: Perturbation, device: str, plan: Plan) -> None:
        self.device = torch.device(device)
        self.reads_hidden = perturbation.reads_hidden
        size = (plan.vocabulary, HIDDEN)
        embedding = nn.Embedding(*size, dtype=plan.dtype).requires_grad_(False)
        matrix = torch.randn(size, generator=torch.Generator().manual_seed(1))
        embedding._parameters["weight"] = self.up(matrix.to(plan.dtype))
        self.embedding = embedding
        self.store = TrajectoryStore(plan.batch, 4096, size, perturbation.has_parameters)
        texts = ["1" if token % 5 == 0 else "b" for token in range(plan.vocabulary)]
        token_bytes = [text.encode() for text in texts]
        gate = BoundGate(perturbation, lambda: token_bytes, plan.vocabulary, self.store.slots, self.device)
        override = InputOverride(
            embedding,
            max_tokens=512,
            drawn_rows=rows_of_buffers(plan.batch),
            hidden=HIDDEN,
            dtype=plan.dtype,
            device=self.device,
        )
        embeddings = ModelEmbeddings(override.lookup, lambda: embedding.weight, None, lambda: (), lambda: texts)
        module = perturbation.module(HIDDEN)
        if module is not None:
            self._move(module)
        self.output_layer: OutputLayer | None = None
        if plan.output_layer:
            weight = self.up(torch.randn(size, generator=torch.Generator().manual_seed(2)).to(plan.dtype))
            self.output_layer = OutputLayer(
                model=Head(weight),
                tensors=[weight],
                example=self.up(torch.zeros(1, HIDDEN, dtype=plan.dtype)),
                vocabulary=plan.vocabulary,
            )
        self.perturber = RolloutPerturber(
            perturbation,
            self.store,
            gate,
            embeddings,
            override,
            self.device,
            module=module,
            masks=SamplingMaskStore(plan.vocabulary, self.store.slots) if plan.masked else None,
            output=self.output_layer,
        )
        self.requests = RunningRequests(perturbation, self.store, self.perturber, registry.buffers.create("memory"))
        perturbation.prepare(embeddings)

    def _move(self, module: nn.Module) -> None:
        """Moves a perturbation's module to the device, which ``Module.to`` cannot do with tensors like these."""
        module.requires_grad_(False)
        for submodule in module.modules():
            for name, parameter in list(submodule._parameters.items()):
                submodule._parameters[name] = self.up(parameter.data)
        if hasattr(module, "lambda_start"):
            module.lambda_start = self.up(module.lambda_start)

    def up(self, tensor: Tensor) -> Any:
        """The tensor on the device."""
        return Pretended(tensor) if self.device.type == "cuda" else tensor

    def logits(self, logits: Tensor) -> Any:
        """Logits (B, V) on the device, with the strides of vLLM's, which pads a vocabulary to a multiple of 64."""
        vocabulary = logits.shape[-1]
        return self.up(nn.functional.pad(logits, (0, -vocabulary % 64))[:, :vocabulary])

    def overridden(self) -> tuple[Tensor, Tensor]:
        """Which rows of the forward are replaced, and the vectors that they get."""
        sources = host_values(self.embedding.override_sources).long()
        vector_rows = sources.clamp_min(0)
        replaced = (sources >= 0) & host_values(self.embedding.override_fed)[vector_rows]
        return replaced, host_values(self.embedding.override_vectors)[vector_rows]
