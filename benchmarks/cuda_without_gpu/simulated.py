# SPDX-License-Identifier: Apache-2.0
"""A made-up scheduler that drives a perturber on a pretended GPU, and each request alone on a CPU: they must agree.

Requests are preempted, computed in chunks, reordered and left out of steps, and their slots are used again; copies to
the host arrive late. Tokens, records, log-probabilities and the vector at every input row are compared.
"""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.cuda_without_gpu.pretended import Device, host_values, pretended_cuda
from benchmarks.cuda_without_gpu.simulated_engine import (
    HIDDEN,
    Engine,
    Plan,
    Request,
    last_hidden_of,
    logits_of,
    requests_of,
)
from ngrpo.rollout.output_layer import OutputLayer
from perturbations import FinishedTrajectory
from perturbations.base import Perturbation


class Disagreement(AssertionError):
    """The pretended GPU did something else than the CPU."""


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
    engine = Engine(perturbation, device, plan)
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
    engine: Engine,
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


def _draw(engine: Engine, batch: list[Request], ends: np.ndarray, plan: Plan) -> Tensor:
    """The next tokens of a batch, (B,), whose forward has ended at these positions."""
    if engine.output_layer is not None:
        return _draw_from_hidden(engine, engine.output_layer, batch, ends, plan)
    rows = []
    for request, end in zip(batch, ends, strict=True):
        rows.append(logits_of(request.name, int(end), request.tokens[end - 1], plan))
    logits = torch.stack(rows)
    hidden = logits[:, :HIDDEN].clone()
    if plan.sampling != "all":
        logits = logits.float()
    scaled = engine.logits(logits)
    drawable = None
    greedy = None
    if plan.sampling == "filtered":
        fortieth = logits.topk(40, dim=-1).values[:, -1:]
        drawable = engine.up(logits.masked_fill(logits < fortieth, -torch.inf))
    if plan.sampling == "greedy":
        cold = torch.tensor([request.seed % 2 == 0 for request in batch])
        greedy = engine.up(torch.where(cold, logits.argmax(dim=-1), -1))
    if engine.reads_hidden:
        engine.perturber.keep_hidden(engine.up(hidden))
    return engine.perturber.finish(scaled, engine.up(torch.ones(len(batch))), drawable, greedy)


def _draw_from_hidden(
    engine: Engine, output_layer: OutputLayer, batch: list[Request], ends: np.ndarray, plan: Plan
) -> Tensor:
    """As :func:`_draw`, where the model has an output layer: a graph computes the logits, if it may."""
    rows = []
    for request, end in zip(batch, ends, strict=True):
        rows.append(last_hidden_of(request.name, int(end), request.tokens[end - 1], plan))
    hidden = engine.up(torch.stack(rows))
    temperature = engine.up(torch.ones(len(batch)))
    if engine.reads_hidden:
        engine.perturber.keep_hidden(hidden)
    if engine.perturber.computes_logits(len(batch)):
        placeholder = output_layer.placeholder(len(batch))
        return engine.perturber.finish(placeholder, temperature, None, None, output_hidden=hidden)
    logits = output_layer.compute(hidden)
    return engine.perturber.finish(logits, temperature, None, None)


def each_alone(perturbation: Perturbation, plan: Plan, count: int) -> tuple[list[Request], dict[str, Any], Any]:
    """Runs each request alone: the requests with their tokens, the records, and the vectors that were fed."""
    all_records: dict[str, Any] = {}
    all_fed: dict[tuple[str, int], Tensor] = {}
    plan_alone = replace(plan, lag=0, preempted=0.0, chunk=1 << 20, batch=1)
    # bfloat16 has many equal logits. A GPU's argmax is the one with the lowest id among them, and a CPU's any of them.
    on_gpu = plan.dtype == torch.bfloat16
    requests = requests_of(plan, count)
    with pretended_cuda() if on_gpu else nullcontext(), torch.inference_mode():
        for request in requests:
            records, fed = _drive(perturbation, "cuda" if on_gpu else "cpu", [request], plan_alone)
            all_records |= records
            all_fed |= fed
    return requests, all_records, all_fed


def together(perturbation: Perturbation, plan: Plan, count: int) -> tuple[list[list[int]], dict[str, Any], Any]:
    """Runs requests together on the pretended GPU: their tokens, the records, and the vectors that were fed."""
    requests = requests_of(plan, count)
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
    requests = requests_of(plan, count)
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
