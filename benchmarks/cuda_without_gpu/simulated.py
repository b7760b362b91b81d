# SPDX-License-Identifier: Apache-2.0
"""A made-up scheduler that drives a perturber on a pretended GPU, and each request alone on a CPU: they must agree.

Requests are preempted, computed in chunks, reordered and left out of steps, and their slots are used again; copies to
the host arrive late. Tokens, records, log-probabilities and the vector at every input row are compared.
"""

import random
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.cuda_without_gpu.pretended import Device, Pretended, host_values, pretended_cuda
from ngrpo.rollout.input_override import InputOverride
from ngrpo.rollout.output_layer import OutputLayer
from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.requests import RunningRequests
from ngrpo.rollout.sampling_support import SamplingMaskStore
from ngrpo.rollout.step_graphs import rows_of_buffers
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations import FinishedTrajectory, registry
from perturbations.base import Perturbation
from perturbations.embeddings import ModelEmbeddings
from perturbations.gates.default import BoundGate

HIDDEN = 16


class Disagreement(AssertionError):
    """The pretended GPU did something else than the CPU."""


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


def _requests(plan: Plan, count: int) -> list[Request]:
    draws = random.Random(plan.seed)
    requests = []
    for number in range(count):
        prompt = draws.choices(range(plan.vocabulary), k=draws.randrange(1, 12))
        most = draws.randrange(1, 20)
        requests.append(Request(name=f"r{number}-{number:08d}", prompt=prompt, most=most, seed=7 * number + 1))
    return requests


def _logits(name: str, position: int, last_token: int, plan: Plan) -> Tensor:
    """Random logits, (V,), that follow from the request, the position and the last token."""
    return (_random(name, position, last_token, plan.vocabulary) * 3).to(plan.dtype)


def _last_hidden(name: str, position: int, last_token: int, plan: Plan) -> Tensor:
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


class _Engine:
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


# The records by request, and the vectors that were fed by request and position.
Rollouts = tuple[dict[str, Any], dict[tuple[str, int], Tensor]]


def _drive(
    perturbation: Perturbation,
    device: str,
    requests: list[Request],
    plan: Plan,
    expected: dict[tuple[str, int], Tensor] | None = None,
    warmed_up: Callable[[], None] | None = None,
) -> Rollouts:
    """Runs requests to their ends; ``expected``: the vectors that must be fed, by request and position."""
    engine = _Engine(perturbation, device, plan)
    draws = random.Random(plan.seed + 1)
    if warmed_up is not None:
        for rows in (2, 1):
            engine.perturber.rehearse(engine.logits(torch.zeros(rows, plan.vocabulary, dtype=plan.dtype)))
        warmed_up()
    queue = list(requests)
    running: list[Request] = []
    finished: list[Request] = []
    fed: dict[tuple[str, int], Tensor] = {}
    records: dict[str, Any] = {}
    while queue or running or finished:
        while queue and len(running) < plan.batch:
            running.append(queue.pop(0))
        for request in running:
            if request.opened and draws.random() < plan.preempted:
                request.computed = 0
                request.preempted = True
        coming = [request for request in running if not request.opened or request.preempted]
        engine.requests.update(_scheduled(coming, finished))
        if draws.random() < 0.7:
            records.update(engine.requests.take([request.name for request in finished]))
        for request in coming:
            request.opened = True
            request.preempted = False
        finished = []
        batch = list(running)
        if plan.shuffled and plan.batch > 1:
            batch = [request for request in running if draws.random() < 0.9]
            draws.shuffle(batch)
        if not batch:
            continue
        starts = np.array([request.computed for request in batch])
        lengths = np.array([len(request.tokens) for request in batch])
        counts = np.minimum(lengths - starts, plan.chunk)
        engine.perturber.begin([request.name for request in batch], starts, counts, starts + counts < lengths)
        _compare_rows(engine, batch, starts, counts, fed, expected)
        tokens = host_values(_draw(engine, batch, starts + counts, plan))
        for row, request in enumerate(batch):
            request.computed = int(starts[row] + counts[row])
            if request.computed == lengths[row]:
                request.tokens.append(int(tokens[row]))
                if len(request.tokens) - len(request.prompt) >= request.most:
                    running.remove(request)
                    finished.append(request)
    engine.requests.update(_scheduled([], []))
    records.update(engine.requests.take(None))
    if engine.requests.running or engine.store.live:
        raise Disagreement(f"requests are left: {list(engine.store.live)}")
    return records, fed


def _scheduled(coming: list[Request], finished: list[Request]) -> Any:
    """The fields of vLLM's ``SchedulerOutput`` that the perturber reads."""
    new_requests = []
    for request in coming:
        new_request = SimpleNamespace(
            req_id=request.name,
            sampling_params=request.parameters,
            prompt_token_ids=request.prompt,
        )
        new_requests.append(new_request)
    finished_names = {request.name for request in finished}
    return SimpleNamespace(finished_req_ids=finished_names, scheduled_new_reqs=new_requests)


def _compare_rows(
    engine: _Engine,
    batch: list[Request],
    starts: np.ndarray,
    counts: np.ndarray,
    fed: dict[tuple[str, int], Tensor],
    expected: dict[tuple[str, int], Tensor] | None,
) -> None:
    """Compares the vectors of a forward's rows with the expected ones, or adds them to ``fed``."""
    replaced, vectors = engine.overridden()
    row = 0
    for request, start, count in zip(batch, starts, counts, strict=True):
        for position in range(start, start + count):
            at = (request.name, position)
            if expected is not None:
                _compare_vector(at, bool(replaced[row]), vectors[row], expected.get(at))
            elif replaced[row]:
                fed[at] = vectors[row].clone()
            row += 1
    if replaced[row:].any():
        raise Disagreement(f"rows beyond the batch are replaced: {replaced[row:].nonzero().flatten().tolist()}")


def _compare_vector(at: tuple[str, int], replaced: bool, vector: Tensor, expected: Tensor | None) -> None:
    """``at``: request and position; ``expected``: the vector, or None where the model's own row is fed."""
    if replaced != (expected is not None):
        raise Disagreement(f"{at}: replaced {replaced}, on a CPU {expected is not None}")
    if expected is None:
        return
    relative = 2.0**-7 if vector.dtype == torch.bfloat16 else 1e-5
    if not torch.allclose(vector, expected, rtol=relative, atol=1e-5):
        raise Disagreement(f"{at}: the vector is off by {(vector - expected).abs().max():.3g}")


def _draw(engine: _Engine, batch: list[Request], ends: np.ndarray, plan: Plan) -> Tensor:
    """The next tokens of a batch, (B,), whose forward has ended at these positions."""
    if engine.output_layer is not None:
        return _draw_from_hidden(engine, engine.output_layer, batch, ends, plan)
    rows = []
    for request, end in zip(batch, ends, strict=True):
        rows.append(_logits(request.name, int(end), request.tokens[end - 1], plan))
    logits = torch.stack(rows)
    hidden = logits[:, :HIDDEN].clone()
    if plan.sampling != "all":
        logits = logits.float()
    scaled = engine.logits(logits)
    drawable = scaled
    greedy = None
    if plan.sampling == "filtered":
        fortieth = logits.topk(40, dim=-1).values[:, -1:]
        drawable = engine.up(logits.masked_fill(logits < fortieth, -torch.inf))
    if plan.sampling == "greedy":
        cold = torch.tensor([request.seed % 2 == 0 for request in batch])
        greedy = engine.up(torch.where(cold, logits.argmax(dim=-1), -1))
    if engine.reads_hidden:
        engine.perturber.computed(engine.up(hidden))
    return engine.perturber.finish(scaled, engine.up(torch.ones(len(batch))), drawable, greedy)


def _draw_from_hidden(
    engine: _Engine, output_layer: OutputLayer, batch: list[Request], ends: np.ndarray, plan: Plan
) -> Tensor:
    """As :func:`_draw`, where the model has an output layer: a graph computes the logits, if it may."""
    rows = []
    for request, end in zip(batch, ends, strict=True):
        rows.append(_last_hidden(request.name, int(end), request.tokens[end - 1], plan))
    hidden = engine.up(torch.stack(rows))
    temperature = engine.up(torch.ones(len(batch)))
    if engine.reads_hidden:
        engine.perturber.computed(hidden)
    if engine.perturber.computes_logits(len(batch)):
        placeholder = output_layer.placeholder(len(batch))
        return engine.perturber.finish(placeholder, temperature, placeholder, None, output_hidden=hidden)
    logits = output_layer.compute(hidden)
    return engine.perturber.finish(logits, temperature, logits, None)


def each_alone(perturbation: Perturbation, plan: Plan, count: int) -> tuple[list[Request], dict[str, Any], Any]:
    """Runs each request alone: the requests with their tokens, the records, and the vectors that were fed."""
    all_records: dict[str, Any] = {}
    all_fed: dict[tuple[str, int], Tensor] = {}
    plan_alone = replace(plan, lag=0, preempted=0.0, chunk=1 << 20, batch=1)
    # bfloat16 has many equal logits. A GPU's argmax is the one with the lowest id among them, and a CPU's any of them.
    on_gpu = plan.dtype == torch.bfloat16
    requests = _requests(plan, count)
    with pretended_cuda() if on_gpu else nullcontext(), torch.inference_mode():
        for request in requests:
            records, fed = _drive(perturbation, "cuda" if on_gpu else "cpu", [request], plan_alone)
            all_records |= records
            all_fed |= fed
    return requests, all_records, all_fed


def together(perturbation: Perturbation, plan: Plan, count: int) -> tuple[list[list[int]], dict[str, Any], Any]:
    """Runs requests together on the pretended GPU: their tokens, the records, and the vectors that were fed."""
    requests = _requests(plan, count)
    with pretended_cuda(plan.lag), torch.inference_mode():
        records, fed = _drive(perturbation, "cuda", requests, plan)
    return [request.tokens for request in requests], records, fed


def simulate(
    perturbation: Perturbation,
    plan: Plan,
    count: int = 8,
    pretended: Callable[[int], AbstractContextManager[Device]] = pretended_cuda,
    warmed_up: Callable[[], None] | None = None,
) -> Device:
    """Runs requests together on the pretended GPU, and each alone on a CPU.

    Args:
        perturbation: what acts.
        plan: how requests are run.
        count: of requests.
        pretended: gives the device for a lag.
        warmed_up: called after an engine's warm-up; None for a run without it.

    Returns:
        The device, with what made the host wait.

    Raises:
        Disagreement: where the two runs differ.
        RuntimeError: where tensors of both devices meet.
    """
    requests_alone, records_alone, fed_alone = each_alone(perturbation, plan, count)
    tokens_alone = {request.name: request.tokens for request in requests_alone}
    requests = _requests(plan, count)
    with pretended(plan.lag) as device, torch.inference_mode():
        records, _fed = _drive(perturbation, "cuda", requests, plan, fed_alone, warmed_up)
    for request in requests:
        if request.tokens != tokens_alone[request.name]:
            raise Disagreement(f"{request.name}: other tokens")
    if set(records) != set(records_alone):
        raise Disagreement(f"records of {set(records) ^ set(records_alone)}")
    for name, packed in records.items():
        _compare_records(name, packed, records_alone[name], plan.masked)
    return device


def _compare_records(name: str, packed: Any, packed_alone: Any, masked: bool) -> None:
    trajectory = FinishedTrajectory.unpack(packed)
    alone = FinishedTrajectory.unpack(packed_alone)
    for field_name in ("positions", "ids", "agreed"):
        if not np.array_equal(getattr(trajectory.record, field_name), getattr(alone.record, field_name)):
            raise Disagreement(f"{name}: other {field_name}")
    weights = trajectory.record.weights
    weights_alone = alone.record.weights
    if not np.allclose(weights, weights_alone, atol=1e-5):
        raise Disagreement(f"{name}: weights are off by {np.abs(weights - weights_alone).max():.3g}")
    same_length = len(trajectory.log_probs) == len(alone.log_probs)
    if not same_length or not np.allclose(trajectory.log_probs, alone.log_probs, atol=1e-5):
        raise Disagreement(f"{name}: other log-probabilities")
    if not masked:
        return
    for field_name in ("positions", "cut", "lengths", "words"):
        if not np.array_equal(getattr(trajectory.sampling_mask, field_name), getattr(alone.sampling_mask, field_name)):
            raise Disagreement(f"{name}: another mask")
