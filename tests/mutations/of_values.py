# SPDX-License-Identifier: Apache-2.0
"""Gradients, and lines that one value of one test holds."""

_RECORDS = "perturbations/test_density_of_records.py"
_DRAWN = "rollout/test_sample_tokens.py"

MUTATIONS = {
    (
        "perturbations/methods/gaussian.py",
        "perturbations/test_score_error.py::test_the_score_of_a_drawn_vector_is_not_drowned",
    ): [
        (
            "densities.gaussian(noise, mean - mean.detach(), sigma)",
            "densities.gaussian(realise(edit, lookup, keys).float().detach(), mean, sigma)",
            "gaussian: the noise is a difference of what rollout and trainer computed",
        ),
    ],
    ("perturbations/methods/gaussian.py", _RECORDS): [
        ("sigma.unsqueeze(-1) * streams.normal", "streams.normal", "gaussian: the noise without its scale"),
    ],
    (
        "perturbations/methods/soft_grpo.py",
        "perturbations/test_score_error.py::test_no_density_is_drowned_and_differences_are",
    ): [
        ("kept, gumbels)", "kept)", "gumbel: rounding decides whether clamped noise has a gradient"),
    ],
    ("perturbations/methods/soft_grpo.py", _RECORDS): [
        ("(gumbels >= high) & ~below", "gumbels > 1e9", "gumbel: noise clamped from above counts as drawn"),
        ("probabilities.detach() + densities", "edit.weights + densities", "normal: another mean than its own"),
    ],
    ("perturbations/density.py", f"perturbations/test_density.py {_RECORDS}"): [
        ("torch.where(below, -exp_minus_noise,", "torch.where(below, -noise,", "exact: noise below a bound"),
        ("seen = kept & (weights >= SMALLEST)", "seen = kept", "exact: a lost weight counts as seen"),
        (".clamp(*_FINITE_NOISE)", "", "censored noise has no bounds"),
    ],
    ("perturbations/methods/latent.py", _RECORDS): [
        (
            "- log_p_of_mixed) / self.scale + low",
            "- log_p_of_mixed) / self.scale",
            "latent, exact: the shift of the noise",
        ),
        ("log_density + densities", "log_density + 0.0 * densities", "latent, exact: the tokens not mixed are missing"),
    ],
    ("perturbations/replay/scope.py", "trainers/common/test_log_probs.py"): [
        ("candidates = candidates.detach()", "candidates = candidates", "constant inputs have a gradient"),
        ("shape[1] - (shape[1] - count)", "shape[1] - (shape[1] - count) - 1", "a score stands at the token before"),
    ],
    (
        "ngrpo/trainers/common/log_probs.py",
        "trainers/common/test_policy_loss.py::test_the_kl_term_is_the_tokens_in_gradient",
    ): [
        (
            "self._score_density = torch.where(inside, density, 0.0)",
            "self._score_density, action = torch.where(inside, density, 0.0), action + density - density.detach()",
            "the KL term has the gradient of a density",
        ),
    ],
    ("ngrpo/config/features.py", "trainers/common/test_policy_loss.py"): [
        ("perturbation.score_only and not perturbation.draws_token", "False", "a KL term without a token"),
    ],
    ("perturbations/parameters.py", "trainers/common/test_policy_loss.py"): [
        ('in ("head", "both")', 'in ("head",)', "freezing both leaves the head out"),
    ],
    ("ngrpo/methods/credits/token_credits.py", "methods/credits/test_credits.py"): [
        (
            "_, groups = tokens.groups[first_tokens].unique(return_inverse=True)",
            "groups = tokens.groups[first_tokens]",
            "first_token: an empty answer before the last group aborts the step",
        ),
    ],
    ("ngrpo/trainers/verl/overrides.py", "methods/advantages/test_advantages.py"): [
        ("token_level_rewards.sum(dim=-1)", "token_level_rewards[:, -1]", "verl: the reward of the last column"),
    ],
    ("ngrpo/trainers/verl/overrides.py", "trainers/openrlhf/test_step_faults.py"): [
        ("(index == group) & trained", "index == group", "verl: a response without a trained token is in its group"),
    ],
    ("ngrpo/trainers/openrlhf/step_advantages.py", "trainers/openrlhf/test_step_faults.py"): [
        ("if values.amin() == values.amax():", "if False:", "equal advantages keep their rounding"),
    ],
    ("ngrpo/workbench/compare/summaries.py", "workbench/compare/test_results.py"): [
        (
            "if not all(measure in run for run in runs):",
            "if sum(measure in run for run in ours) != sum(measure in run for run in baseline):",
            "a pair that lacks a run",
        ),
        ('run["steps"][1:] or run["steps"]', 'run["steps"]', "the warm-up step has a speed"),
    ],
    ("perturbations/replay/scope.py", "perturbations/methods/test_hrpo.py"): [
        ("if module is None or scale == 1.0:", "if True:", "a module is fed scaled embeddings"),
    ],
    ("perturbations/replay/flat_records.py", "perturbations/replay/test_scope.py"): [
        (
            '_widened(record.weights, width, "constant")',
            '_widened(record.weights, width, "edge")',
            "narrow records are widened with weights",
        ),
        (
            "np.zeros((len(record), *shape",
            "np.ones((len(record), *shape",
            "a record without noise beside one with it has noise",
        ),
    ],
    ("ngrpo/rollout/runners.py", "methods/sampling_schedules/test_sampling_schedules_run.py"): [
        (
            "div_(factor.unsqueeze(-1))\n            temperature = temperature * factor",
            "div_(factor.unsqueeze(-1))",
            "V1: the factor is not told to finish",
        ),
    ],
    ("ngrpo/rollout/perturber.py", _DRAWN): [
        (
            "positions.keys(streams.Stream.TOKEN",
            "streams.keys(rows.seeds, rows.first, streams.Stream.TOKEN",
            "the prompt's draw",
        ),
    ],
    ("ngrpo/rollout/step_kernels.py", _DRAWN): [
        ("torch.where(logits.greedy >= 0, log", "torch.where(logits.greedy > 0, log", "greedy token 0 is drawn"),
        (
            "drawable = logits.scaled if logits.drawable is None else logits.drawable",
            "drawable = logits.scaled",
            "a cut token is proposed",
        ),
    ],
    ("perturbations/seeds.py", "rollout/test_requests.py"): [
        ("(perturbation_seed, engine_seed) &", "(perturbation_seed) &", "engines share their seeds"),
    ],
    ("perturbations/gates/default.py", "perturbations/gates/test_default.py"): [
        ("step.positions <= self._ended[rows]", "step.positions < self._ended[rows]", "until: the end is drawn again"),
    ],
    ("perturbations/streams.py", "perturbations/test_streams.py"): [
        (".clamp_max(1.0 - 2.0**-24)", "", "an exponential draw may be infinite"),
    ],
    ("perturbations/neighbors/refresh.py", "perturbations/neighbors/test_refresh.py"): [
        ("self._every != 1", "self._every not in (None, 1)", "never: sets of the live matrix"),
    ],
    ("ngrpo/workbench/compare/summaries.py", "workbench/test_statistics.py"): [
        (
            "if abs(value) <= statistics.TIE and all_equal",
            "if value >= 0.0 and all_equal",
            "verdict: a difference without an interval is none",
        ),
    ],
    ("ngrpo/workbench/statistics.py", "workbench/test_statistics.py"): [
        (
            'difference["low"] <= 0.0 <= difference["high"]',
            'difference["low"] < 0.0 < difference["high"]',
            "bootstrap: 0 at the end of an interval",
        ),
    ],
    ("ngrpo/workbench/evaluate/sample_comparison.py", "workbench/evaluate/test_sample_comparison.py"): [
        ("right / m >= tau", "right / m > tau", "cover: exactly the share is too few"),
    ],
    ("perturbations/replay/trajectory.py", "perturbations/replay/test_trajectory.py"): [
        ("highest >= vocabulary", "highest > vocabulary", "replay: token V is one of V tokens"),
    ],
}
