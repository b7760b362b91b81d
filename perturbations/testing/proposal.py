# SPDX-License-Identifier: Apache-2.0
"""Checks of a perturbation's proposals, density and learned parameters, on a small synthetic model."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from perturbations import streams
from perturbations.base import Perturbation, Proposal, Replayed
from perturbations.edit import InputEdit, realise
from perturbations.embeddings import matrix_embeddings
from perturbations.replay import ReplayRecord
from perturbations.step import Step
from perturbations.testing.report import (
    CLOSE,
    EVERY_ROW,
    PerturbationError,
    answered,
    check_answers,
    check_tensor,
    differing,
    of_rows,
    require,
)

ROWS, _DIMENSION = 7, 8
_SIZES = [64, 256, 1024, 4096, 1 << 14, 1 << 16, 1 << 18]
_log = logging.getLogger(__name__)
_Value = TypeVar("_Value")


def check_model(perturbation: Perturbation) -> None:
    """There is a small model that the perturbation fits."""
    try:
        perturbation.check_model(_SIZES[-1])
    except ValueError as error:
        raise PerturbationError(
            f"{perturbation.name}: check_model refuses a vocabulary of {_SIZES[-1]:,} tokens: {error}",
            "Refuse only a vocabulary that is too small for the options.",
        ) from error


def vocabulary_for(perturbation: Perturbation) -> int:
    """V of the synthetic model: the smallest that the perturbation fits."""
    for size in _SIZES[:-1]:
        with contextlib.suppress(ValueError):
            perturbation.check_model(size)
            return size
    return _SIZES[-1]


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
    proposal = check_answers(where, "propose()", lambda some: _propose(perturbation, some, where), step)
    if label == "ordinary logits":
        other = dataclasses.replace(step, seeds=step.seeds + 1)
        same = differing(proposal, _propose(perturbation, other, where), exact=True) is None
        message = "draws no weights or tokens of its own" if same else "draws weights or tokens from the seed"
        _log.info("%s %s", perturbation.name, message)
    _check_record(step, proposal, where)
    if perturbation.has_density:
        check_density(perturbation, step, proposal, where)


def _propose(perturbation: Perturbation, step: Step, where: str) -> Proposal:
    proposal = answered(f"{where} propose()", lambda: perturbation.propose(step))
    require(
        isinstance(proposal, Proposal) and isinstance(proposal.edit, InputEdit),
        f"{where} propose() returns {type(proposal).__name__}.",
        "Return Proposal(InputEdit(ids, weights), tokens): what is fed, and the token that stands in the text.",
    )
    _check_proposal(perturbation, step, proposal, where)
    return proposal


def _check_proposal(perturbation: Perturbation, step: Step, proposal: Proposal, where: str) -> None:
    """Shapes, types, ranges and values of one proposal."""
    rows, vocabulary = step.logits.shape
    edit, device = proposal.edit, step.logits.device
    width = edit.ids.shape[-1] if isinstance(edit.ids, Tensor) and edit.ids.dim() == 2 else 1
    check_tensor(f"{where} edit.ids", edit.ids, (rows, max(width, 1)), torch.int64, device)
    check_tensor(f"{where} edit.weights", edit.weights, (rows, width), torch.float32, device)
    check_tensor(f"{where} tokens", proposal.tokens, (rows,), torch.int64, device)
    for name, ids in (("edit.ids", edit.ids), ("tokens", proposal.tokens)):
        outside = ids[(ids < 0) | (ids >= vocabulary)].tolist()
        require(not outside, f"{where} {name} holds {_first(outside)}.", f"Token ids must be in [0, {vocabulary - 1}].")
    broken = edit.weights[~torch.isfinite(edit.weights)].tolist()
    fix = "Weights must be finite, whatever the logits: a masked token's logit is -inf, and 0 · inf is nan."
    require(not broken, f"{where} edit.weights holds {_first(broken)}.", fix)
    _check_weights(perturbation, edit, where)
    if proposal.acts is not None:
        _check_acts(proposal, proposal.acts, where)
    _check_parts(step, edit, where)
    ruled_out = proposal.tokens[step.logits.gather(-1, proposal.tokens.unsqueeze(-1)).isneginf().flatten()].tolist()
    require(
        not ruled_out,
        f"{where} token {_first(ruled_out)} stands in the text though its logit is -inf: it was ruled out.",
        "Choose a possible token, for example step.sampled or the argmax of step.logits.",
    )
    require(
        not perturbation.samples_text or torch.equal(proposal.tokens, step.sampled),
        f"{where} samples_text is True, but another token than the sampled one stands in the text.",
        "Answer with step.sampled, or leave samples_text at False: importance weights would be wrong.",
    )
    keys = streams.keys(step.seeds, step.positions, streams.Stream.NOISE)
    fed = realise(edit, step.embeddings.lookup, keys, perturbation.module(_DIMENSION))
    finite = torch.isfinite(fed).all()
    require(finite, f"{where} the perturbed input is not finite.", "Check weights, sigma and vectors.")


def _first(values: list[_Value]) -> _Value | None:
    return values[0] if values else None


def _check_acts(proposal: Proposal, acts: Tensor, where: str) -> None:
    """Where it does not act, the edit is the token alone: whoever does not look at ``acts`` feeds the same."""
    edit = proposal.edit
    check_tensor(f"{where} acts", acts, (len(edit.ids),), torch.bool, edit.ids.device)
    alone = (edit.weights * (edit.ids == proposal.tokens.unsqueeze(-1))).sum(dim=-1)
    if ((alone - 1.0).abs() > CLOSE)[~acts].any() or (edit.sigma is not None and edit.sigma[~acts].any()):
        raise PerturbationError(
            f"{where} a position where acts is False is fed something else than its token.",
            "Give the token weight 1 there, and no noise.",
        )


def _check_weights(perturbation: Perturbation, edit: InputEdit, where: str) -> None:
    weights, kind = edit.weights, perturbation.mixture
    fix = "It must be 'convex' (weights not negative, sum 1), 'affine' (sum 1) or 'free'."
    require(kind in ("convex", "affine", "free"), f"{where} mixture is {kind!r}.", fix)
    least = weights.min().item()
    fix = "Weights must not be negative. Where they are meant to be, say mixture = 'affine' or 'free' in the class."
    require(kind != "convex" or least >= 0.0, f"{where} edit.weights holds {least:g}.", fix)
    sums = weights.double().sum(dim=-1)
    worst = sums[(sums - 1.0).abs().argmax()].item()
    replaced = edit.vectors is not None or perturbation.module(_DIMENSION) is not None
    require(
        kind == "free" or replaced or abs(worst - 1.0) <= CLOSE,
        f"{where} the weights of a position sum to {worst:.6g}.",
        "They must sum to 1, or the input's length would change: normalise them (divide by their sum). Where that"
        " is meant, say mixture = 'free' in the class.",
    )


def _check_parts(step: Step, edit: InputEdit, where: str) -> None:
    """What an edit may have beside ids and weights."""
    rows = len(step.logits)
    for name, shape in (("sigma", (rows,)), ("vectors", (rows, _DIMENSION)), ("normalizer", (rows,))):
        part = getattr(edit, name)
        if part is None:
            continue
        check_tensor(f"{where} edit.{name}", part, shape, torch.float32, step.logits.device)
        limits = "finite and not negative" if name == "sigma" else "finite"
        within = torch.isfinite(part).all() and (name != "sigma" or part.min() >= 0.0)
        require(within, f"{where} edit.{name} holds {part.min().item()}.", f"It must be {limits}.")


def check_module(perturbation: Perturbation) -> None:
    """Learned parameters start alike in every process, and each row is its own."""
    torch.manual_seed(1)
    module, trained = perturbation.module(_DIMENSION), perturbation.module(_DIMENSION)
    torch.manual_seed(2)
    other = perturbation.module(_DIMENSION)
    if module is None or trained is None or other is None:
        return
    for (name, one), two in zip(module.named_parameters(), other.parameters()):
        require(
            torch.equal(one, two),
            f"{perturbation.name}: the parameter {name!r} of its module starts differently in each process.",
            "Trainer and rollout each make their own: start with constants, or draw with perturbations.streams.",
        )
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
        require(
            parameter.grad is not None and torch.isfinite(parameter.grad).all(),
            f"{perturbation.name}: no finite gradient reaches {name}, a parameter of its module.",
            "Use it in forward(), without detach, no_grad or a division by 0.",
        )


def _check_record(step: Step, proposal: Proposal, where: str) -> None:
    """The edits survive being written to a record, to bytes and back."""
    edit = proposal.edit
    record = ReplayRecord(
        seed=1,
        prompt_tokens=1,
        num_tokens=int(step.positions[-1]) + 1,
        positions=step.positions.to(torch.int32).numpy(),
        ids=edit.ids.to(torch.int32).numpy(),
        weights=edit.weights.numpy(),
        sigma=None if edit.sigma is None else edit.sigma.numpy(),
        vectors=None if edit.vectors is None else edit.vectors.numpy(),
        normalizer=None if edit.normalizer is None else edit.normalizer.numpy(),
        agreed=(proposal.tokens == step.sampled).numpy(),
    )
    again = ReplayRecord.from_bytes(record.to_bytes())
    for name in ("positions", "ids", "weights", "sigma", "vectors", "normalizer", "agreed"):
        one, two = getattr(record, name), getattr(again, name)
        same = one is two if one is None or two is None else np.array_equal(one, two)
        fix = "Please report this: the record format is ours."
        require(same, f"{where} {name} does not survive a replay record.", fix)


def replayed(step: Step, proposal: Proposal, logits: Tensor) -> Replayed:
    """What a trainer whose forward gave ``logits`` (B, V) would hand to the density of a proposal."""
    rows = torch.arange(len(logits), device=logits.device)
    return Replayed(
        logits,
        rows,
        token_log_probs=torch.log_softmax(logits, dim=-1)[rows, proposal.tokens],
        temperature=float(step.temperature[0]),
        edit=proposal.edit,
        noise_keys=streams.keys(step.seeds, step.positions, streams.Stream.NOISE),
        lookup=step.embeddings.lookup,
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
    seen = f"{density.dtype} {tuple(density.shape)}" if isinstance(density, Tensor) else type(density).__name__
    expected = f"torch.float32 ({len(logits)},)"
    require(seen == expected, f"{label} returns {seen}.", f"It must be {expected}: a number per position.")
    broken = density[~torch.isfinite(density)].tolist()
    require(not broken, f"{label} holds {broken[:1]}.", "It must be finite.")
    if density.requires_grad:
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
