# SPDX-License-Identifier: Apache-2.0
"""Checks of a density: its values and gradients, and that it is the density of what ``propose`` draws."""

import dataclasses
from functools import partial

import torch
from torch import Tensor, nn

from perturbations import Perturbation, Proposal, Step, streams
from perturbations.base import Replayed
from perturbations.testing.report import EVERY_ROW, answered, check_tensor, expect, of_rows, refuse
from perturbations.testing.waits import check_without_values

_DRAWS = 2048  # of the inputs of one position, over which a mean is taken
_MOST_TOKENS = 1024  # of a vocabulary whose logits are repeated for so many draws
_TEMPERATURE = 0.5  # of these draws; not 1, at which a density may leave the temperature out
# The largest mean gradient, relative to the gradient's root mean square. By chance that of 2,048 draws is up to 0.06.
_MEAN_GRADIENT = 0.1


def replayed(step: Step, proposal: Proposal, logits: Tensor) -> Replayed:
    """The argument that a trainer passes to the density of a proposal after a forward that gave ``logits`` (B, V)."""
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
    """The density and its gradient are finite, each row depends on that row alone, and no rows give no densities.

    ``step`` has one temperature. ``where``: perturbation and step, for messages.
    """
    label = f"{where} log_density()"
    logits = step.logits.clone().requires_grad_()
    argument = replayed(step, proposal, logits)
    density = answered(label, lambda: perturbation.log_density(argument))
    check_tensor(f"{label}: its result", density, (len(logits),), torch.float32, logits.device)
    refuse(density, ~torch.isfinite(density), label, "It must be finite.")
    expect(density.requires_grad, f"{label} has no gradient.", "Compute it from `replayed`, without detach().")
    density.sum().backward()
    is_finite = logits.grad is None or torch.isfinite(logits.grad).all()
    expect(is_finite, f"{label} has no finite gradient.", "Clamp before logarithms and divisions.")

    tolerance = 1e-4 * (1.0 + density.detach().abs().max().item())
    advantages = torch.where(torch.arange(len(logits)) % 2 == 0, 1.0, -1.0)
    of_advantages = perturbation.log_density(dataclasses.replace(argument, advantages=advantages))
    difference = (of_advantages - density).abs().max().item()
    expect(
        difference <= tolerance,
        f"{label} differs by {difference:g} with replayed.advantages of 1 and -1 and without any.",
        "The old policy's density has no advantages, so the ratio of the two would be wrong. Let advantages change the"
        " gradient alone: value.detach() + other - other.detach().",
    )

    order = torch.arange(len(logits)).flip(0)
    for how, rows in (("in another batch order", order), ("for a row alone", order[:1])):
        of_selection = perturbation.log_density(_selected(replayed(step, proposal, step.logits), rows))
        difference = (of_selection.detach() - density.detach()[rows]).abs().max().item()
        expect(difference <= tolerance, f"{label} differs by {difference:g} {how}.", EVERY_ROW)

    # One of several ranks may have no perturbed position. It must gather and reduce as the other ranks do.
    no_positions = _selected(argument, order[:0])
    fix = "For no positions it must return shape (0,)."
    of_none = answered(f"{label} for no positions", lambda: perturbation.log_density(no_positions), fix)
    expect(of_none.shape == (0,), f"{label} returns {tuple(of_none.shape)} for no positions.", fix)
    expect(
        of_none.requires_grad == density.requires_grad,
        f"{label} leaves the graph where there are no positions.",
        "Compute it on no rows; skip nothing.",
    )


def _selected(argument: Replayed, rows: Tensor) -> Replayed:
    """The positions with these numbers, in their order; the logits' rows stay, as in a packed batch."""
    return dataclasses.replace(of_rows(argument, rows), logits=argument.logits)


def check_device(perturbation: Perturbation, step: Step) -> None:
    """The density computes on the device of the trainer's logits."""
    argument = replayed(step, perturbation.propose(step), step.logits)
    embedding = step.embeddings.matrix().to("meta")
    module = None if step.module is None else step.module.to("meta")

    def log_density(on_meta: Replayed) -> Tensor:
        lookup = partial(nn.functional.embedding, weight=embedding)
        return perturbation.log_density(dataclasses.replace(on_meta, lookup=lookup, module=module))

    fix = "Make tensors where the logits are: torch.zeros(n, device=replayed.logits.device)."
    check_without_values(f"{perturbation.name}:", "log_density()", log_density, argument, fix=fix, in_training=True)


def check_is_of_the_draws(perturbation: Perturbation, step: Step) -> None:
    """Over many draws at one position it behaves as the log-density of what ``propose`` draws.

    The mean of a log-density's gradient is 0, and its mean is largest at the policy that draws.

    ``step``: the logits of its first row are taken.
    """
    if step.logits.shape[-1] > _MOST_TOKENS:
        return
    label = f"{perturbation.name}: log_density()"
    many_draws = _many_draws(step)
    proposal = perturbation.propose(many_draws)
    if proposal.acts is not None and not proposal.acts.all():
        return  # where the perturbation acts may be a draw too
    mean_gradient = _mean_gradient(perturbation, many_draws, proposal)
    expect(
        mean_gradient <= _MEAN_GRADIENT,
        f"{label} is not the log-density of what propose() draws at temperature {_TEMPERATURE}: over {_DRAWS:,} draws"
        f" the mean of its gradient is {mean_gradient:.2g} of the gradient's size, and not 0.",
        "Compute it with the formula and the options of propose(); with replayed.log_probs(ids) where propose() has"
        " log p; and with replayed.temperature where propose() has step.temperature, by which the logits of both are"
        " divided already. If it is no log-density by intent, say zero_mean_score = False in the class.",
    )
    if perturbation.score_only:
        return
    gain = _gain_of_the_drawing_policy(perturbation, many_draws, proposal)
    expect(
        gain >= 0.0,
        f"{label} is smaller for the policy that drew the inputs than for policies beside it, by {-gain:.2g} in the"
        f" mean of {_DRAWS:,} draws: training would make what is rewarded less likely.",
        "Return log p, and not -log p.",
    )


def check_text_probabilities(perturbation: Perturbation, step: Step) -> None:
    """Over many draws at one position each token is in the text as often as ``text_probabilities`` says.

    ``step``: the logits of its first row are taken.
    """
    vocabulary = step.logits.shape[-1]
    if vocabulary > _MOST_TOKENS:
        return
    many_draws = _many_draws(step)
    tokens = perturbation.propose(many_draws).tokens
    logits = many_draws.logits[:1]
    left = torch.ones_like(logits, dtype=torch.bool)
    probabilities = perturbation.text_probabilities(logits, _TEMPERATURE, left)[0]  # (V,)
    shares = torch.bincount(tokens, minlength=vocabulary) / _DRAWS
    excess = (shares - probabilities).abs() - 5.0 * (probabilities / _DRAWS).sqrt()
    token = int(excess.argmax())
    expect(
        excess[token] <= 2.0 / _DRAWS,
        f"{perturbation.name}: text_probabilities() gives {probabilities[token]:.3g} for token {token} at temperature"
        f" {_TEMPERATURE}, and propose() writes it into {shares[token]:.3g} of {_DRAWS:,} texts.",
        "Compute them with the formula, options and temperature of propose().",
    )


def _many_draws(step: Step) -> Step:
    """The first row of a step many times, each time with a seed of its own."""
    logits = step.logits[:1].expand(_DRAWS, -1)  # (draws, V)
    seeds = torch.arange(_DRAWS)
    positions = step.positions[:1].expand(_DRAWS)
    noise = streams.gumbel(streams.keys(seeds, positions, streams.Stream.TOKEN), logits.shape[-1])
    return dataclasses.replace(
        step,
        logits=logits,
        sampled=(logits + noise).argmax(dim=-1),
        temperature=torch.full((_DRAWS,), _TEMPERATURE),
        seeds=seeds,
        positions=positions,
        hidden=None if step.hidden is None else step.hidden[:1].expand(_DRAWS, -1),
    )


def _mean_gradient(perturbation: Perturbation, step: Step, proposal: Proposal) -> float:
    """‖E[∇ℓ]‖ over the root mean square of ∇ℓ in the logits, 0 without a gradient; ℓ is what the loss weighs."""
    logits = step.logits.clone().requires_grad_()
    argument = replayed(step, proposal, logits)
    entry = perturbation.log_density(argument)
    if perturbation.draws_token:
        entry = entry + argument.token_log_probs
    (gradients,) = torch.autograd.grad(entry.sum(), logits, materialize_grads=True)  # (draws, V)
    mean_square = gradients.square().sum() / _DRAWS
    if mean_square == 0.0:
        return 0.0
    return gradients.mean(dim=0).norm().div(mean_square.sqrt()).item()


def _gain_of_the_drawing_policy(perturbation: Perturbation, step: Step, proposal: Proposal) -> float:
    """How much larger the density is at the step's logits than beside them, in the mean; 0 where chance decides."""
    noise = 0.2 * torch.randn(step.logits.shape, generator=torch.Generator().manual_seed(22))
    with torch.no_grad():
        densities = []
        for logits in (step.logits, step.logits + noise, step.logits - noise):
            densities.append(perturbation.log_density(replayed(step, proposal, logits)))
    at_policy, above, below = densities
    gains = at_policy - 0.5 * (above + below)  # (draws,); what is linear in the logits cancels
    gain = gains.mean().item()
    is_clear = abs(gain) > 5.0 * gains.std().item() / _DRAWS**0.5
    return gain if is_clear else 0.0
