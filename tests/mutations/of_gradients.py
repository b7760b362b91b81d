# SPDX-License-Identifier: Apache-2.0
"""Scores of densities, where gradients go, and what an entry in the loss can go with."""

from __future__ import annotations

from tests.mutations.mutation import of_file

GRADIENTS = [
    *of_file(
        "perturbations/methods/gaussian.py",
        "test_score_error.py::test_the_score_of_a_drawn_vector_is_not_drowned",
        (
            "densities.gaussian(noise, mean - mean.detach(), sigma)",
            "densities.gaussian(realise(edit, lookup, keys).float().detach(), mean, sigma)",
            "gaussian: the noise is a difference of what rollout and trainer computed",
        ),
    ),
    *of_file(
        "perturbations/methods/gaussian.py",
        "test_density.py",
        ("sigma.unsqueeze(-1) * streams.normal", "streams.normal", "gaussian: the noise without its scale"),
    ),
    *of_file(
        "perturbations/methods/soft_grpo.py",
        "test_score_error.py::test_no_density_is_drowned_and_differences_are",
        (
            "densities.gumbel(scores, probabilities, distinct, gumbels)",
            "densities.gumbel(scores, probabilities, distinct)",
            "gumbel: rounding decides whether clamped noise has a gradient",
        ),
    ),
    *of_file(
        "perturbations/methods/soft_grpo.py",
        "test_density.py",
        ("(gumbels >= high) & ~below", "gumbels > 1e9", "gumbel: noise clamped from above counts as drawn"),
        ("below = (gumbels <= low) |", "below =", "gumbel: noise clamped from below counts as drawn"),
    ),
    *of_file(
        "perturbations/methods/soft_grpo.py",
        "test_density.py",
        ("densities.NORMAL_SIGMA * replayed.normal", "replayed.normal", "normal: the noise without its scale"),
        ("probabilities.detach() + densities", "edit.weights + densities", "normal: another mean than its own"),
    ),
    *of_file(
        "perturbations/density.py",
        "test_density.py",
        ("torch.log(-torch.expm1(-share))", "-noise", "exact: noise above a bound"),
        ("torch.where(below, -share,", "torch.where(below, -noise,", "exact: noise below a bound"),
        ("- seen.sum(dim=-1) * total", "- total", "exact: the weights' density counts its total once"),
        ("log_p - tau * weights", "log_p + tau * weights", "exact: the power of the weights"),
        ("seen = kept & (weights >= SMALLEST)", "seen = kept", "exact: a lost weight counts as seen"),
        ("shape * log_weights - torch.lgamma(shape + 1.0)", "0.0 * shape", "exact: a lost weight of Dirichlet's"),
        (
            "seen = (shape - 1.0) * log_weights - torch.lgamma(shape)",
            "seen = (shape - 1.0) * log_weights",
            "exact: Dirichlet's density is not normalised",
        ),
    ),
    *of_file(
        "perturbations/methods/latent.py",
        "test_density.py",
        ("- own) / self.scale + low", "- own) / self.scale", "latent, exact: the shift of the noise"),
        ("~mixed & (beyond.detach() < high)", "~mixed", "latent, exact: noise that no bound could hold is waited for"),
        (
            "return log_density + densities",
            "return log_density + 0.0 * densities",
            "latent, exact: the tokens not mixed are missing",
        ),
        (
            "gumbels >= high, support)",
            "gumbels > 1e9, support)",
            "latent, exact: noise clamped from above counts as drawn",
        ),
    ),
    *of_file(
        "perturbations/replay/scope.py",
        "test_density_loss.py",
        ("candidates = candidates.detach()", "candidates = candidates", "constant inputs have a gradient"),
        (
            "column = padded - flat.sample * shape[1] - (shape[1] - count)",
            "column = padded - flat.sample * shape[1] - (shape[1] - count) - 1",
            "a score stands at the token before",
        ),
    ),
    *of_file(
        "ngrpo/trainers/common/log_probs.py",
        "test_loss_entry.py::test_the_kl_term_is_the_tokens_in_gradient",
        (
            "self._scored = torch.where(inside, density, 0.0)",
            "self._scored, action = torch.where(inside, density, 0.0), action + density - density.detach()",
            "the KL term has the gradient of a density",
        ),
    ),
    *of_file(
        "ngrpo/config/features.py",
        "test_loss_entry.py",
        ("lambda made: made.score_only)", "lambda made: False)", "a vector's density at noisy rollouts"),
        ("lambda made: made.draws_text)", "lambda made: False)", "a request's filters choose among the draws"),
        ("made.score_only and not made.draws_token", "False", "a KL term without a token"),
    ),
    *of_file(
        "ngrpo/config/run_notes.py",
        "test_loss_entry.py",
        ("and not perturbation.zero_mean_score", "and perturbation.has_density", "tokens that were not drawn"),
        ("not run.credit.keeps_sums", "False", "a credit that breaks the sum is not warned of"),
    ),
    *of_file(
        "perturbations/parameters.py",
        "test_loss_entry.py",
        (
            'perturbation.freeze in ("head", "both")',
            'perturbation.freeze in ("head",)',
            "freezing both leaves the head out",
        ),
    ),
]
