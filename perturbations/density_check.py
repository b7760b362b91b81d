"""The part of the conformance suite that looks at a perturbation's density."""

from __future__ import annotations

import torch
from torch import Tensor

from perturbations import streams
from perturbations.base import Perturbation, Proposal, Replayed
from perturbations.step import Step


def replayed(step: Step, proposal: Proposal, logits: Tensor) -> Replayed:
    """What a trainer whose forward gave ``logits`` (B, V) would hand to the density of a proposal."""
    rows = torch.arange(len(logits), device=logits.device)
    log_probs = torch.log_softmax(logits, dim=-1)[rows, proposal.tokens]
    keys = streams.keys(step.seeds, step.positions, streams.Stream.NOISE)
    temperature = float(step.temperature[0])
    return Replayed(logits, rows, log_probs, temperature, proposal.edit, keys, step.embeddings.lookup)


def density_problem(perturbation: Perturbation, step: Step, proposal: Proposal) -> tuple[str, str] | None:
    """What is wrong with a perturbation's density at B positions, and how to fix it; None where nothing is.

    Args:
        perturbation: one with a density.
        step: B positions, all of one temperature.
        proposal: the perturbation's answer to ``step``.
    """
    logits = step.logits.clone().requires_grad_()
    try:
        density = perturbation.log_density(replayed(step, proposal, logits))
    except Exception as error:
        return f"log_density() raises {type(error).__name__}: {error}", "It must answer for any logits."
    if not isinstance(density, Tensor) or density.shape != (len(logits),) or density.dtype != torch.float32:
        seen = f"{density.dtype} {tuple(density.shape)}" if isinstance(density, Tensor) else type(density).__name__
        return f"log_density() returns {seen}", f"It must be torch.float32 ({len(logits)},): a number per position."
    if not torch.isfinite(density).all():
        return f"log_density() holds {density[~torch.isfinite(density)][0].item()}", "It must be finite."
    if density.requires_grad:
        density.sum().backward()
        if logits.grad is not None and not torch.isfinite(logits.grad).all():
            return "the gradient of log_density() is not finite", "Clamp before logarithms and divisions."
    order = torch.arange(len(logits)).flip(0)
    other = perturbation.log_density(_selected(replayed(step, proposal, step.logits), order))
    worst = (other.detach() - density.detach()[order]).abs().max().item()
    if worst > 1e-4 * (1.0 + density.detach().abs().max().item()):
        return f"log_density() differs by {worst:g} in another batch order", "Each row must depend on that row alone."
    return _problem_on_no_positions(perturbation, replayed(step, proposal, logits), order[:0], density.requires_grad)


def _problem_on_no_positions(
    perturbation: Perturbation, full: Replayed, none: Tensor, in_graph: bool
) -> tuple[str, str] | None:
    """On several ranks one may have no perturbed position: it must gather and reduce as the others do."""
    try:
        density = perturbation.log_density(_selected(full, none))
    except Exception as error:
        return f"log_density() raises {type(error).__name__} for no positions: {error}", "It must return shape (0,)."
    if density.shape != (0,):
        return f"log_density() returns {tuple(density.shape)} for no positions", "It must return shape (0,)."
    if density.requires_grad != in_graph:
        return "log_density() leaves the graph where there are no positions", "Compute it on no rows; skip nothing."
    return None


def _selected(full: Replayed, order: Tensor) -> Replayed:
    """Some of the positions, in another order; the logits' rows stay, as in a packed batch."""
    parts = {name: getattr(full.edit, name) for name in ("ids", "weights", "sigma", "vectors", "normalizer")}
    edit = type(full.edit)(**{name: None if part is None else part[order] for name, part in parts.items()})
    keys, log_probs = full.noise_keys[order], full.token_log_probs[order]
    return Replayed(full.logits, full.rows[order], log_probs, full.temperature, edit, keys, full.lookup)
