# SPDX-License-Identifier: Apache-2.0
"""A made-up scheduler that drives a perturber on a pretended GPU, and each request alone on a CPU, which must agree.

Requests are preempted, computed in chunks, reordered and left out of steps, and their slots are used again; copies to
the host arrive late. Compared are the tokens, the records, the log-probabilities, and the vector at every input row.
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

from benchmarks.cuda_without_gpu.pretended import Device, Pretended, pretended_cuda
from ngrpo.rollout.input_override import InputOverride
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
        lag: how many steps later copies arrive.
        preempted: probability that a request is preempted in a step.
        chunk: positions of a prompt computed at once.
        batch: requests at once.
        masked: whether the tokens that filters left are recorded.
        sampling: ``all``, ``filtered`` (the 40 likeliest), or ``greedy`` (every other request).
        vocabulary: V; not a multiple of 64, so that the last block of a row is filled up.
        dtype: of the embeddings and, where nothing filters, of the logits.
        shuffled: whether requests change rows and miss steps; else a batch keeps decoding in its order.
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


@dataclass
class Request:
    """A request as the scheduler has it."""

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

    def one(i: int) -> Request:
        prompt = draws.choices(range(plan.vocabulary), k=draws.randrange(1, 12))
        return Request(f"r{i}-{i:08d}", prompt, draws.randrange(1, 20), 7 * i + 1)

    return [one(i) for i in range(count)]


def _logits(name: str, position: int, last: int, plan: Plan) -> Tensor:
    seed = zlib.crc32(f"{name} {position} {last}".encode())
    return (torch.randn(plan.vocabulary, generator=torch.Generator().manual_seed(seed)) * 3).to(plan.dtype)


class _Engine:
    def __init__(self, perturbation: Perturbation, device: str, plan: Plan) -> None:
        self.device, self.reads_hidden = torch.device(device), perturbation.reads_hidden
        size = plan.vocabulary, HIDDEN
        embedding = nn.Embedding(*size, dtype=plan.dtype).requires_grad_(False)
        matrix = torch.randn(size, generator=torch.Generator().manual_seed(1))
        embedding._parameters["weight"] = self.up(matrix.to(plan.dtype))
        self.embedding, self.store = embedding, TrajectoryStore(plan.batch, 4096, size, perturbation.has_parameters)
        texts = ["1" if i % 5 == 0 else "b" for i in range(plan.vocabulary)]
        pieces = [text.encode() for text in texts]
        gate = BoundGate(perturbation, lambda: pieces, plan.vocabulary, self.store.slots, self.device)
        override = InputOverride(embedding, 512, rows_of_buffers(plan.batch), HIDDEN, plan.dtype, self.device)
        embeddings = ModelEmbeddings(override.lookup, lambda: embedding.weight, None, lambda: (), lambda: texts)
        module = perturbation.module(HIDDEN)
        if module is not None:
            module.requires_grad_(False)
            for owner in module.modules():
                for name, part in list(owner._parameters.items()):
                    owner._parameters[name] = self.up(part.data)
            if hasattr(module, "lambda_start"):
                module.lambda_start = self.up(module.lambda_start)
        self.perturber = RolloutPerturber(
            perturbation,
            self.store,
            gate,
            embeddings,
            override,
            self.device,
            module,
            SamplingMaskStore(plan.vocabulary, self.store.slots) if plan.masked else None,
        )
        self.requests = RunningRequests(perturbation, self.store, self.perturber, registry.buffers.create("memory"))
        perturbation.prepare(embeddings)

    def up(self, part: Tensor) -> Any:
        return Pretended(part) if self.device.type == "cuda" else part

    def logits(self, part: Tensor) -> Any:
        """As vLLM has them: of more columns than tokens, where a vocabulary is filled up to a multiple of 64."""
        size = part.shape[-1]
        return self.up(nn.functional.pad(part, (0, -size % 64))[:, :size])

    def overridden(self) -> tuple[Tensor, Tensor]:
        """Which rows of the forward are replaced, and the vectors that they get."""
        sources = _values(self.embedding.override_sources).long()
        vector_rows = sources.clamp_min(0)
        replaced = (sources >= 0) & _values(self.embedding.override_fed)[vector_rows]
        return replaced, _values(self.embedding.override_vectors)[vector_rows]


def _values(part: Tensor) -> Tensor:
    return part.values if isinstance(part, Pretended) else part


Found = tuple[dict[str, Any], dict[tuple[str, int], Tensor]]


def _drive(
    perturbation: Perturbation,
    device: str,
    requests: list[Request],
    plan: Plan,
    expected: dict[tuple[str, int], Tensor] | None = None,
    warmed_up: Callable[[], None] | None = None,
) -> Found:
    """Runs requests: what was recorded of each, and the vectors that were fed, by request and position."""
    engine, draws = _Engine(perturbation, device, plan), random.Random(plan.seed + 1)
    if warmed_up is not None:
        for rows in (2, 1):
            engine.perturber.rehearse(engine.logits(torch.zeros(rows, plan.vocabulary, dtype=plan.dtype)))
        warmed_up()
    queue, running, finished, fed, out = list(requests), [], [], {}, {}
    while queue or running or finished:
        while queue and len(running) < plan.batch:
            running.append(queue.pop(0))
        for request in running:
            if request.opened and draws.random() < plan.preempted:
                request.computed, request.preempted = 0, True
        coming = [request for request in running if not request.opened or request.preempted]
        engine.requests.update(_scheduled(coming, finished))
        if draws.random() < 0.7:
            out.update(engine.requests.take([request.name for request in finished]))
        for request in coming:
            request.opened, request.preempted = True, False
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
        tokens = _values(_finished(engine, batch, starts + counts, plan))
        for i, request in enumerate(batch):
            request.computed = int(starts[i] + counts[i])
            if request.computed == lengths[i]:
                request.tokens.append(int(tokens[i]))
                if len(request.tokens) - len(request.prompt) >= request.most:
                    running.remove(request)
                    finished.append(request)
    engine.requests.update(_scheduled([], []))
    out.update(engine.requests.take(None))
    if engine.requests.running or engine.store.live:
        raise Disagreement(f"requests are left: {list(engine.store.live)}")
    return out, fed


def _scheduled(coming: list[Request], finished: list[Request]) -> Any:
    new = [SimpleNamespace(req_id=r.name, sampling_params=r.parameters, prompt_token_ids=r.prompt) for r in coming]
    return SimpleNamespace(finished_req_ids={request.name for request in finished}, scheduled_new_reqs=new)


def _compare_rows(
    engine: _Engine,
    batch: list[Request],
    starts: np.ndarray,
    counts: np.ndarray,
    fed: dict[tuple[str, int], Tensor],
    expected: dict[tuple[str, int], Tensor] | None,
) -> None:
    flags, vectors = engine.overridden()
    row, rounded = 0, 2.0**-7 if vectors.dtype == torch.bfloat16 else 1e-5
    for i, request in enumerate(batch):
        for position in range(starts[i], starts[i] + counts[i]):
            at = request.name, position
            if expected is not None:
                want = expected.get(at)
                if bool(flags[row]) != (want is not None):
                    raise Disagreement(f"{at}: replaced {bool(flags[row])}, on a CPU {want is not None}")
                if want is not None and not torch.allclose(vectors[row], want, rtol=rounded, atol=1e-5):
                    raise Disagreement(f"{at}: the vector is off by {(vectors[row] - want).abs().max():.3g}")
            elif bool(flags[row]):
                fed[at] = vectors[row].clone()
            row += 1
    if flags[row:].any():
        raise Disagreement(f"rows beyond the batch are replaced: {flags[row:].nonzero().flatten().tolist()}")


def _finished(engine: _Engine, batch: list[Request], ends: np.ndarray, plan: Plan) -> Tensor:
    rows = zip(batch, ends, strict=True)
    logits = torch.stack([_logits(r.name, int(end), r.tokens[end - 1], plan) for r, end in rows])
    hidden = logits[:, :HIDDEN].clone()
    logits = logits if plan.sampling == "all" else logits.float()
    scaled, greedy, sampling = engine.logits(logits), None, plan.sampling
    drawable = scaled
    if sampling == "filtered":
        drawable = engine.up(logits.masked_fill(logits < logits.topk(40, dim=-1).values[:, -1:], -torch.inf))
    if sampling == "greedy":
        cold = torch.tensor([request.seed % 2 == 0 for request in batch])
        greedy = engine.up(torch.where(cold, logits.argmax(dim=-1), -1))
    if engine.reads_hidden:
        engine.perturber.computed(engine.up(hidden))
    return engine.perturber.finish(scaled, engine.up(torch.ones(len(batch))), drawable, greedy)


def each_alone(perturbation: Perturbation, plan: Plan, count: int) -> tuple[list[Request], dict[str, Any], Any]:
    """Runs each request alone: the requests with their tokens, what was recorded of each, and the vectors fed."""
    recorded: dict[str, Any] = {}
    fed: dict[tuple[str, int], Tensor] = {}
    single = replace(plan, lag=0, preempted=0.0, chunk=1 << 20, batch=1)
    # Of equal logits, of which bfloat16 has many, a GPU's first is the one with the lower id, and a CPU's any.
    rounded = plan.dtype == torch.bfloat16
    requests = _requests(plan, count)
    with pretended_cuda() if rounded else nullcontext(), torch.inference_mode():
        for request in requests:
            out, vectors = _drive(perturbation, "cuda" if rounded else "cpu", [request], single)
            recorded |= out
            fed |= vectors
    return requests, recorded, fed


def together(perturbation: Perturbation, plan: Plan, count: int) -> tuple[list[list[int]], dict[str, Any], Any]:
    """Runs requests together on the pretended GPU: their tokens, what was recorded of each, and the vectors fed."""
    requests = _requests(plan, count)
    with pretended_cuda(plan.lag), torch.inference_mode():
        recorded, fed = _drive(perturbation, "cuda", requests, plan)
    return [request.tokens for request in requests], recorded, fed


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
        What made the host wait.

    Raises:
        Disagreement: where the two differ.
        RuntimeError: where tensors of both devices meet.
    """
    requests, alone, fed = each_alone(perturbation, plan, count)
    texts = {request.name: request.tokens for request in requests}
    batched = _requests(plan, count)
    with pretended(plan.lag) as device, torch.inference_mode():
        records, _ = _drive(perturbation, "cuda", batched, plan, fed, warmed_up)
    for request in batched:
        if request.tokens != texts[request.name]:
            raise Disagreement(f"{request.name}: other tokens")
    if set(records) != set(alone):
        raise Disagreement(f"records of {set(records) ^ set(alone)}")
    for name, parts in alone.items():
        _compare_records(name, parts, records[name], plan.masked)
    return device


def _compare_records(name: str, one: Any, other: Any, masked: bool) -> None:
    one, other = FinishedTrajectory.unpack(one), FinishedTrajectory.unpack(other)
    a, b = one.record, other.record
    for part in ("positions", "ids", "agreed"):
        if not np.array_equal(getattr(a, part), getattr(b, part)):
            raise Disagreement(f"{name}: other {part}")
    if not np.allclose(a.weights, b.weights, atol=1e-5):
        raise Disagreement(f"{name}: weights are off by {np.abs(a.weights - b.weights).max():.3g}")
    log_probs = [each.log_probs for each in (one, other)]
    if len(log_probs[0]) != len(log_probs[1]) or not np.allclose(*log_probs, atol=1e-5):
        raise Disagreement(f"{name}: other log-probabilities")
    if masked:
        a, b = one.sampling_mask, other.sampling_mask
        names = ("positions", "cut", "lengths", "words")
        if not all(np.array_equal(getattr(a, part), getattr(b, part)) for part in names):
            raise Disagreement(f"{name}: another mask")
