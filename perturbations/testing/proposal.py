# SPDX-License-Identifier: Apache-2.0
"""Checks on steps of a small synthetic model: a perturbation's, its density and module, a gate's."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perturbations import Gate, GateStep, InputEdit, Perturbation, Positions, Proposal, Step, streams
from perturbations.base import Replayed
from perturbations.edit import realise
from perturbations.embeddings import matrix_embeddings
from perturbations.testing.report import (
    CLOSE,
    EVERY_ROW,
    PerturbationError,
    answered,
    check_answers,
    check_tensor,
    differing,
    global_random_state,
    mapped,
    of_rows,
    require,
)

ROWS, _DIMENSION = 7, 8
# Operations by the calls that a user writes.
_CALLS = {"aten._local_scalar_dense.default": "item()", "aten._to_copy.default": "cpu()"}
_SIZES = [64, 256, 1024, 4096, 1 << 14, 1 << 16, 1 << 18]
_log = logging.getLogger(__name__)


def check_model(perturbation: Perturbation) -> int:
    """V of the synthetic model: the smallest that the perturbation fits."""
    what, fix = "", "Refuse only a vocabulary that is too small for the options."
    for size in _SIZES:
        try:
            perturbation.check_model(size)
            return size
        except ValueError as error:
            what = f"{perturbation.name}: check_model refuses a vocabulary of {size:,} tokens: {error}"
    raise PerturbationError(what, fix)


def steps(vocabulary: int) -> list[tuple[str, Step]]:
    """Steps over a synthetic model: ordinary logits, temperatures, masks, both extremes of confidence."""
    generator = torch.Generator().manual_seed(20)
    embedding = torch.randn(vocabulary, _DIMENSION, generator=generator)
    embedding[5] = 0.0  # never-trained tokens: a zero row and two equal ones
    embedding[7] = embedding[6]
    embeddings = matrix_embeddings(embedding, special_ids=(0, 1))
    seeds = torch.randint(-(2**62), 2**62, (ROWS,), generator=generator)
    positions = torch.randint(1, 10_000, (ROWS,), generator=generator).sort().values
    raw = 3.0 * torch.randn(ROWS, vocabulary, generator=generator)

    def step(logits: Tensor, temperature: float = 1.0, drawable: Tensor | None = None) -> Step:
        noise = streams.gumbel(streams.keys(seeds, positions, streams.Stream.TOKEN), vocabulary)
        sampled = ((logits if drawable is None else drawable) + noise).argmax(dim=-1)
        return Step(logits, sampled, torch.full((ROWS,), temperature), seeds, positions, embeddings, drawable)

    masked = raw.clone()
    masked[:, :3] = -torch.inf
    masked[1, 4:] = -torch.inf  # one possible token, as grammars do
    peaked = raw.clone()
    peaked[torch.arange(ROWS), torch.arange(ROWS) + 9] = 1e4
    likely = torch.where(raw >= raw.topk(5, dim=-1).values[:, -1:], raw, -torch.inf)
    return [
        ("ordinary logits", step(raw)),
        ("top-k of the request", step(raw, drawable=likely)),
        ("temperature 0.3", step(raw / 0.3, 0.3)),
        ("temperature 1.5", step(raw / 1.5, 1.5)),
        ("logits with -inf (masked tokens)", step(masked)),
        ("very peaked logits", step(peaked)),
        ("uniform logits", step(torch.zeros_like(raw))),
    ]


def with_hidden(step: Step, module: nn.Module | None, size: int = _DIMENSION) -> Step:
    """A step with last hidden states (B, ``size``), the same at each call, and the perturbation's module."""
    generator = torch.Generator().manual_seed(21)
    return dataclasses.replace(step, hidden=torch.randn(len(step.logits), size, generator=generator), module=module)


def check_step(perturbation: Perturbation, label: str, step: Step) -> None:
    """The proposals for one step: valid, repeatable, and each row's own."""
    where = f"{perturbation.name}, {label}:"
    if perturbation.reads_hidden:
        step = with_hidden(step, perturbation.module(_DIMENSION))

    def proposed(some: Step) -> Proposal:
        proposal = answered(f"{where} propose()", lambda: perturbation.propose(some))
        right = isinstance(proposal, Proposal) and isinstance(proposal.edit, InputEdit)
        fix = "Return Proposal(InputEdit(ids, weights), tokens): what is fed, and the token of the text."
        require(right, f"{where} propose() returns {type(proposal).__name__}.", fix)
        _check_proposal(perturbation, some, proposal, where)
        return proposal

    proposal = check_answers(where, "propose()", proposed, step)
    if label == "ordinary logits":
        other = dataclasses.replace(step, seeds=step.seeds + 1)
        same = differing(proposal, proposed(other), exact=True) is None
        message = "draws no weights or tokens of its own" if same else "draws weights or tokens from the seed"
        _log.info("%s %s", perturbation.name, message)
    if perturbation.has_density:
        check_density(perturbation, step, proposal, where)
    elif not hasattr(perturbation, "density"):
        used = type(perturbation).log_density is Perturbation.log_density
        require(used, f"{where} log_density() is never called.", "Override has_density too, or take it out.")


def check_waits(perturbation: Perturbation, step: Step) -> None:
    """A proposal needs no value on the host; what a neighbor index does there is its own."""
    module = perturbation.module(_DIMENSION) if perturbation.reads_hidden else None
    step = with_hidden(step, module and module.to("meta"))
    _check_without_values(f"{perturbation.name}:", "propose()", perturbation.propose, step)


def _check_proposal(perturbation: Perturbation, step: Step, proposal: Proposal, where: str) -> None:
    """Shapes, types, ranges and values of one proposal."""
    rows, vocabulary = step.logits.shape
    edit, weights, device = proposal.edit, proposal.edit.weights, step.logits.device
    width = edit.ids.shape[-1] if isinstance(edit.ids, Tensor) and edit.ids.dim() == 2 else 1
    check_tensor(f"{where} edit.ids", edit.ids, (rows, max(width, 1)), torch.int64, device)
    check_tensor(f"{where} edit.weights", weights, (rows, width), torch.float32, device)
    check_tensor(f"{where} tokens", proposal.tokens, (rows,), torch.int64, device)
    fix = f"Token ids must be in [0, {vocabulary - 1}]."
    for name, ids in (("edit.ids", edit.ids), ("tokens", proposal.tokens)):
        _none_of(ids, (ids < 0) | (ids >= vocabulary), f"{where} {name}", fix)
    fix = "Weights must be finite, whatever the logits: a masked token's logit is -inf, and 0 · inf is nan."
    _none_of(weights, ~torch.isfinite(weights), f"{where} edit.weights", fix)
    fix = "It must be 'convex' (weights not negative, sum 1), 'affine' (sum 1) or 'free'."
    kind = perturbation.mixture
    require(kind in ("convex", "affine", "free"), f"{where} mixture is {kind!r}.", fix)
    fix = "Weights must not be negative. Where they are meant to be, say mixture = 'affine' or 'free' in the class."
    _none_of(weights, (weights < 0.0) & (kind == "convex"), f"{where} edit.weights", fix)
    sums = weights.double().sum(dim=-1)
    worst = sums[(sums - 1.0).abs().argmax()].item()
    replaced = edit.vectors is not None or perturbation.module(_DIMENSION) is not None
    normalised = kind == "free" or replaced or abs(worst - 1.0) <= CLOSE
    fix = "They must sum to 1, or the input's length changes: normalise them, or say mixture = 'free' in the class."
    require(normalised, f"{where} the weights of a position sum to {worst:.6g}.", fix)
    if proposal.acts is not None:  # where it does not act, the edit is the token alone
        check_tensor(f"{where} acts", proposal.acts, (rows,), torch.bool, device)
        alone = (weights * (edit.ids == proposal.tokens.unsqueeze(-1))).sum(dim=-1)
        other = ((alone - 1.0).abs() > CLOSE) | (False if edit.sigma is None else edit.sigma != 0.0)
        what = f"{where} a position where acts is False is fed something else than its token."
        require(not other[~proposal.acts].any(), what, "Give the token weight 1 there, and no noise.")
    for name, shape in (("sigma", (rows,)), ("vectors", (rows, _DIMENSION)), ("normalizer", (rows,))):
        part, limits = getattr(edit, name), "finite and not negative" if name == "sigma" else "finite"
        if part is not None:
            check_tensor(f"{where} edit.{name}", part, shape, torch.float32, device)
            wrong = ~torch.isfinite(part) | ((part < 0.0) & (name == "sigma"))
            _none_of(part, wrong, f"{where} edit.{name}", f"It must be {limits}.")
    ruled_out = step.logits.gather(-1, proposal.tokens.unsqueeze(-1)).isneginf().flatten()
    fix = "Its logit is -inf. Choose a possible token, for example step.sampled or the argmax of step.logits."
    _none_of(proposal.tokens, ruled_out, f"{where} tokens", fix)
    what = f"{where} samples_text is True, but another token than the sampled one is in the text."
    fix = "Return step.sampled, or leave samples_text at False: importance weights would be wrong."
    require(not perturbation.samples_text or torch.equal(proposal.tokens, step.sampled), what, fix)
    keys = streams.keys(step.seeds, step.positions, streams.Stream.NOISE)
    fed = realise(edit, step.embeddings.lookup, keys, perturbation.module(_DIMENSION))
    finite = torch.isfinite(fed).all()
    require(finite, f"{where} the perturbed input is not finite.", "Check weights, sigma and vectors.")


def _none_of(values: Tensor, wrong: Tensor, label: str, fix: str) -> None:
    for value in values[wrong].tolist()[:1]:
        raise PerturbationError(f"{label} holds {value:g}.", fix)


def check_module(perturbation: Perturbation) -> None:
    """Learned parameters start alike in every process, and each row is its own."""
    torch.manual_seed(1)
    module, trained = perturbation.module(_DIMENSION), perturbation.module(_DIMENSION)
    torch.manual_seed(2)
    other = perturbation.module(_DIMENSION)
    if module is None or trained is None or other is None:
        return
    for (name, one), two in zip(module.named_parameters(), other.parameters()):
        what = f"{perturbation.name}: the parameter {name!r} of its module starts differently in each process."
        require(torch.equal(one, two), what, "Start with constants, or draw with perturbations.streams.")
    rows = torch.randn(5, _DIMENSION, generator=torch.Generator().manual_seed(3))
    for kind in (torch.float32, torch.bfloat16):
        made, label = module.to(kind), f"{perturbation.name}: its module with parameters in {kind}"
        whole = made(rows, rows.flip(0))
        fix = "It must compute in float32 whatever its parameters are: write self.w.float() in forward()."
        require(whole.dtype == torch.float32, f"{label} gives {whole.dtype}.", fix)
        alone = torch.cat([made(rows[i : i + 1], rows.flip(0)[i : i + 1]) for i in range(5)])
        difference = differing(whole.detach(), alone.detach(), name="its output")
        fix = f"It must treat each row alone. {EVERY_ROW}"
        require(not difference, f"{label}: a row alone gives another result, {difference}.", fix)
        check_tensor(f"{label}, given no rows,", made(rows[:0], rows[:0]), (0, _DIMENSION), torch.float32, rows.device)
    trained.requires_grad_()
    reached = trained(rows, rows.flip(0)).square().sum()
    if reached.requires_grad:
        reached.backward()
    for name, parameter in trained.named_parameters():
        finite = parameter.grad is not None and torch.isfinite(parameter.grad).all()
        what = f"{perturbation.name}: no finite gradient reaches {name}, a parameter of its module."
        require(finite, what, "Use it in forward(), without detach, no_grad or a division by 0.")


def replayed(step: Step, proposal: Proposal, logits: Tensor) -> Replayed:
    """What a trainer would hand to the density of a proposal after a forward that gave ``logits`` (B, V)."""
    rows = torch.arange(len(logits), device=logits.device)
    return Replayed(
        logits,
        rows,
        token_log_probs=torch.log_softmax(logits, dim=-1)[rows, proposal.tokens],
        temperature=float(step.temperature[0]),
        edit=proposal.edit,
        noise_keys=streams.keys(step.seeds, step.positions, streams.Stream.NOISE),
        lookup=lambda ids: step.embeddings.lookup(ids).requires_grad_(logits.requires_grad),
        draw_keys=step.keys_of(streams.Stream.WEIGHTS),
        hidden=step.hidden,
        module=step.module,
    )


def check_density(perturbation: Perturbation, step: Step, proposal: Proposal, where: str) -> None:
    """The density of a proposal to a step of one temperature: finite, as its gradient, each row's own, for no rows too.

    ``where``: perturbation and step, for messages.
    """
    label = f"{where} log_density()"
    logits = step.logits.clone().requires_grad_()
    full = replayed(step, proposal, logits)
    density = answered(label, lambda: perturbation.log_density(full))
    check_tensor(f"{label}: its result", density, (len(logits),), torch.float32, logits.device)
    _none_of(density, ~torch.isfinite(density), label, "It must be finite.")
    require(density.requires_grad, f"{label} has no gradient.", "Compute it from `replayed`, without detach().")
    density.sum().backward()
    finite = logits.grad is None or torch.isfinite(logits.grad).all()
    require(finite, f"{label} has no finite gradient.", "Clamp before logarithms and divisions.")
    order = torch.arange(len(logits)).flip(0)
    other = perturbation.log_density(_selected(replayed(step, proposal, step.logits), order))
    worst = (other.detach() - density.detach()[order]).abs().max().item()
    close = worst <= 1e-4 * (1.0 + density.detach().abs().max().item())
    require(close, f"{label} differs by {worst:g} in another batch order.", EVERY_ROW)
    # On several ranks one may have no perturbed position: it must gather and reduce as the others do.
    shape = "For no positions it must return shape (0,)."
    none = answered(f"{label} for no positions", lambda: perturbation.log_density(_selected(full, order[:0])), shape)
    require(none.shape == (0,), f"{label} returns {tuple(none.shape)} for no positions.", shape)
    in_graph = none.requires_grad == density.requires_grad
    require(in_graph, f"{label} leaves the graph where there are no positions.", "Compute it on no rows; skip nothing.")


def _selected(full: Replayed, order: Tensor) -> Replayed:
    """Some of the positions, in another order; the logits' rows stay, as in a packed batch."""
    return dataclasses.replace(of_rows(full, order), logits=full.logits)


_TRAJECTORIES = ((1, 5), (-9, 0), (2**47, 300))  # of a gate's plan: seed, prompt's length


def check_decides(gate: Gate) -> None:
    """The gate implements at least one of its two methods."""
    decides = type(gate).plan is not Gate.plan or type(gate).open is not Gate.open
    fix = "Write open(self, step) -> (B,) bool to look at logits, plan(self, positions) -> (N,) bool for positions."
    require(decides, f"{gate.name}: it has neither plan() nor open(), so it is always open.", fix)


def check_plan(gate: Gate) -> None:
    """Each position is judged alone, whichever others are in the same call."""
    steps = np.concatenate([np.arange(90), np.arange(91, 400, 7)])
    seeds, first = (np.repeat(np.array(part), len(steps)) for part in zip(*_TRAJECTORIES))
    every = Positions(seeds, first, first + np.tile(steps, len(_TRAJECTORIES)))
    before, state = every.positions.copy(), global_random_state()
    whole = _plan(gate, every)
    drawn = f"{gate.name}: plan() draws from a global random generator (torch's, numpy's or Python's)."
    require(global_random_state() == state, drawn, "Draw with positions.uniform: the same numbers in each call.")
    unchanged = np.array_equal(every.positions, before)
    require(unchanged, f"{gate.name}: plan() changes positions.positions in place.", "Work on a copy.")
    rows = np.arange(len(whole))
    for part in (rows[:1], rows[1:2], rows[2:40], rows[40:41], rows[::-1], rows[7::11]):
        again = _plan(gate, every.where(part))
        for at in np.flatnonzero(whole[part] != again)[:1]:
            said = f"{whole[part][at]} of position {every.positions[part][at]} among all and {again[at]} among others"
            fix = "Judge each position alone, in steps of any trajectories, and keep no state between calls."
            raise PerturbationError(f"{gate.name}: plan() says {said}.", fix)


def _plan(gate: Gate, positions: Positions) -> np.ndarray:
    planned = answered(f"{gate.name}: plan()", lambda: gate.plan(positions), "It must accept any positions.")
    seen, shape = type(planned).__name__, positions.positions.shape
    if isinstance(planned, np.ndarray):
        seen = f"an array of {planned.dtype}, {planned.shape}"
    fix = f"Return a numpy array of bool, {shape}: one a position."
    require(seen == f"an array of bool, {shape}", f"{gate.name}: plan() returns {seen}.", fix)
    return planned


def check_state(gate: Gate) -> None:
    """A gate with a state has numbers by name to start with, and moves them on."""
    start = answered(f"{gate.name}: initial_state()", gate.initial_state)
    numbers = isinstance(start, Mapping) and all(isinstance(value, int | float) for value in start.values())
    fix = 'Return numbers by name, such as {"spent": 0}.'
    require(numbers, f"{gate.name}: initial_state() returns {start!r}.", fix)
    moves = type(gate).advance is not Gate.advance
    fix = 'Write initial_state(self), such as {"spent": 0}: advance() would never be called.'
    require(start or not moves, f"{gate.name}: it has advance() and no state.", fix)
    fix = "Write advance(self, step, fed) -> (B,) by name, the state after each position."
    require(moves or not start, f"{gate.name}: its state never changes, since it has no advance().", fix)


def check_open(gate: Gate, label: str, step: Step) -> None:
    """One result per row, its own, the same each time, and without waiting for the device; for the state too."""
    where = f"{gate.name}, {label}:"

    def opened(some: GateStep) -> Tensor:
        result = answered(f"{where} open()", lambda: gate.open(some))
        check_tensor(f"{where} what open() returns", result, (len(some.logits),), torch.bool, some.logits.device)
        return result

    def moved(some: GateStep) -> Mapping[str, Tensor]:
        return gate.advance(some, some.sampled % 2 == 0)

    def advanced(some: GateStep) -> Mapping[str, Tensor]:
        result = answered(f"{where} advance()", lambda: moved(some))
        names = list(result) if isinstance(result, Mapping) else type(result).__name__
        fix = "It must return the names of initial_state(), no more and no fewer."
        require(isinstance(result, Mapping) and {*result} == {*some.state}, f"{where} advance() returns {names}.", fix)
        result = {name: part.float() if isinstance(part, Tensor) else part for name, part in result.items()}
        for name, part in result.items():
            label = f"{where} {name!r} of what advance() returns"
            check_tensor(label, part, (len(some.logits),), torch.float32, some.logits.device)
        return result

    asked: list[tuple[str, Callable[[GateStep], Any], Callable[[GateStep], Any]]] = [("open()", gate.open, opened)]
    start = {name: torch.full((len(step.logits),), float(value)) for name, value in gate.initial_state().items()}
    seen = GateStep.of(step, torch.arange(len(step.logits)), start)
    if start:
        asked.append(("advance()", moved, advanced))
        for row in range(len(step.logits)):  # row i has seen i positions
            after = advanced(seen)
            state = {name: torch.cat([part[: row + 1], after[name][row + 1 :]]) for name, part in seen.state.items()}
            seen = dataclasses.replace(seen, state=state)
    for method, ask, checked in asked:
        check_answers(where, method, checked, seen)
        _check_without_values(where, method, ask, seen)


class _Waits(TorchDispatchMode):
    """Raises for two operations that tensors without values allow: copies to the host, and values set by a mask."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = str(func), kwargs or {}
        copied = "to_copy" in name and str(kwargs.get("device")) == "cpu" and args[0].device.type != "cpu"
        masks = "index_put" in name and any(i is not None and i.dtype == torch.bool for i in args[1])
        if copied or (masks and args[2].numel() != 1):
            raise fake_tensor.DataDependentOutputException(func)
        return func(*args, **kwargs)


def _check_without_values(where: str, method: str, ask: Callable[[Any], Any], seen: Step | GateStep) -> None:
    """On tensors without values, as on a GPU: an operation that needs a value would halt its pipeline at every step."""
    embeddings = matrix_embeddings(seen.embeddings.matrix().to("meta"))
    empty = dataclasses.replace(mapped(seen, lambda part: part.to("meta")), embeddings=embeddings)
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), _Waits():
        try:
            ask(empty)
        except Exception as error:
            if "devices" in str(error):
                what = f"{where} {method} computes with a tensor on the CPU: on a GPU the first token would fail."
                fix = "Make tensors where the step's are: torch.zeros(n, device=step.logits.device)."
                raise PerturbationError(what, fix) from error
            waits = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
            if not isinstance(error, waits) and "to numpy" not in str(error):
                return  # an operation without a fake form tests nothing
            name = str(getattr(error, "func", "numpy()"))
            what = f"{where} {method} waits for the device ({_CALLS.get(name, name)}): the rollout would stop there at"
            fix = "No .item(), .cpu() or nonzero(), no `if` on a tensor, no indexing with a mask: use torch.where."
            raise PerturbationError(f"{what} every token.", fix) from error
