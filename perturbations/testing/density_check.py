# SPDX-License-Identifier: Apache-2.0
"""The part of the conformance suite that looks at a perturbation's density."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from perturbations import streams
from perturbations.base import Perturbation, Proposal, Replayed
from perturbations.step import Step
from perturbations.testing.report import EVERY_ROW, answered, of_rows, require


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
    """The density of a proposal: finite, with a finite gradient, each row's own, and defined for no rows.

    Args:
        perturbation: one with a density.
        step: B positions, all of one temperature.
        proposal: the perturbation's answer to ``step``.
        where: perturbation and step, for messages.
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
    return replace(of_rows(full, order), logits=full.logits)
