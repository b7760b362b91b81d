# SPDX-License-Identifier: Apache-2.0
"""Lines that one value of one test holds."""

from __future__ import annotations

from tests.mutations.mutation import of_file

_DRAWN = "test_drawn_tokens.py"

VALUES = [
    *of_file(
        "ngrpo/methods/credits/token_credits.py",
        "test_credits.py",
        (".unique(return_inverse=True)[1]", "", "first_token: an empty answer before the last group aborts the step"),
    ),
    *of_file(
        "ngrpo/methods/credits/base.py",
        "test_credits_simko.py",
        ("rows.split(size)", "[rows]", "credits: the entropies of a batch in one block"),
    ),
    *of_file(
        "ngrpo/trainers/verl/overrides.py",
        "test_advantages.py",
        ("token_level_rewards.sum(dim=-1)", "token_level_rewards[:, -1]", "verl: the reward of the last column"),
        ("if bool(response_mask[rows].any())", "if True", "verl: padding is a group"),
    ),
    *of_file(
        "ngrpo/trainers/common/mismatch.py",
        "test_policy_noises.py",
        (
            "(weight < bounds.low) | (weight > bounds.high)",
            "weight > bounds.high",
            "importance: the lower bound is ignored",
        ),
    ),
    *of_file(
        "ngrpo/methods/advantages/base.py",
        "test_advantages_best_of_k.py",
        ("k=round(self.k", "k=int(self.k", "a linear k is cut off, not rounded"),
    ),
    *of_file(
        "ngrpo/methods/second_rounds/lope.py",
        "test_second_rounds.py",
        ("add_special_tokens=False)) <= length", "add_special_tokens=False)) <= length + 1", "lope: a token too many"),
    ),
    *of_file(
        "ngrpo/workbench/compare/results.py",
        "test_compare_results.py",
        ("len(having[0] + having[1]) < len(runs)", "len(having[0]) != len(having[1])", "a pair that lacks a run"),
        (
            "pairs = [(own[seed], base[seed]) for seed in shared]",
            "pairs = list(zip(own.values(), base.values()))",
            "the memory of different seeds is compared",
        ),
        ('run["steps"][1:] or run["steps"]', 'run["steps"]', "the warm-up step has a speed"),
    ),
    *of_file(
        "perturbations/replay/scope.py",
        "test_hrpo.py",
        ("if self._module is not None and scale != 1.0", "if False", "a module is fed scaled embeddings"),
    ),
    *of_file(
        "perturbations/replay/scope.py",
        "test_replay.py",
        ('widened(r.weights, "constant")', 'widened(r.weights, "edge")', "narrow records are widened with weights"),
    ),
    *of_file(
        "ngrpo/rollout/runners.py",
        "test_sampling_schedules_run.py",
        (
            "temperature = scaled.div_(factor.unsqueeze(-1)), temperature * factor",
            "temperature = scaled.div_(factor.unsqueeze(-1)), temperature",
            "V1: the factor is not told to finish",
        ),
    ),
    *of_file(
        "ngrpo/rollout/perturber.py",
        _DRAWN,
        ("torch.where(greedy >= 0, greedy, draw", "torch.where(greedy > 0, greedy, draw", "greedy token 0 is drawn"),
        (
            "at.keys(streams.Stream.TOKEN)",
            "streams.keys(at.seeds, at.first, streams.Stream.TOKEN)",
            "the prompt's draw",
        ),
    ),
    *of_file(
        "ngrpo/rollout/step_kernels.py",
        _DRAWN,
        (
            "(logits.scaled if drawable is None else drawable)[gated",
            "logits.scaled[gated",
            "a token that a filter cut may be proposed",
        ),
        (
            ", self._gate.matched(slots, positions), sampled > 0)",
            ", self._gate.matched(slots, positions))",
            "discarded",
        ),
    ),
    *of_file(
        "perturbations/seeds.py",
        "test_request_seeds.py",
        ("trajectory_seed(perturbation, engine) &", "trajectory_seed(perturbation) &", "engines share their seeds"),
    ),
    *of_file(
        "perturbations/gates/default.py",
        "test_gates.py",
        (
            "now, state = torch.where(kept, now, before), torch.where(kept, state, self._states[rows, at])",
            "now = torch.where(kept, now, before)",
            "until: a token that is not kept is seen",
        ),
        ("step.positions <= self._ended[rows]", "step.positions < self._ended[rows]", "until: the end is drawn again"),
    ),
    *of_file(
        "perturbations/streams.py",
        "test_streams.py",
        (".clamp_max(1.0 - 2.0**-24)", "", "an exponential draw may be infinite"),
        (
            "_shift_right(_bits(keys_, n), 24).float() + 0.5) * 2.0**-40",
            "_shift_right(_bits(keys_, n), 26).float() + 0.5) * 2.0**-38",
            "exponential draws are two bits coarser",
        ),
        ("41) < least", "41) <= least", "below includes its bound"),
    ),
    *of_file(
        "perturbations/density.py",
        "test_density.py",
        (".clamp(*_REACH)", "", "censored noise has no bounds"),
    ),
    *of_file(
        "perturbations/methods/tarpo.py",
        "test_tarpo.py",
        (
            "(hidden.float(), self.weight.float(), self.bias_shift.float())",
            "(hidden, self.weight.to(hidden), self.bias_shift.to(hidden)).float()",
            "tarpo: the router computes in the hidden state's dtype",
        ),
    ),
    *of_file(
        "perturbations/methods/latent.py",
        "test_strategies_mixtures.py",
        (
            "torch.where(weights < densities.SMALLEST, 0.0, weights)",
            "weights",
            "latent: denormal weights are recorded",
        ),
    ),
    *of_file(
        "perturbations/methods/soft.py",
        "test_strategies_mixtures.py",
        (".clamp(0.0, 1.0)", "", "moi: more entropy than there is"),
    ),
    *of_file(
        "perturbations/neighbors/refresh.py",
        "test_neighbors_refresh.py",
        ("self._refresh.every != 1", "self._refresh.every not in (None, 1)", "never: sets of the live matrix"),
        (
            "self._on_demand and self._refresh.every != 1",
            "self._refresh.every is None",
            "n-th: sets of the live matrix",
        ),
    ),
    *of_file(
        "ngrpo/workbench/compare/results.py",
        "test_compare_results.py",
        (
            "for problem in having[0][0] if all(problem in run for side in having for run in side)",
            "for problem in having[0][0]",
            "a problem that a run lacks",
        ),
    ),
    *of_file(
        "ngrpo/workbench/compare/results.py",
        "test_significance.py",
        ("value == 0.0 and", "value >= 0.0 and", "verdict: a difference without an interval is none"),
    ),
    *of_file(
        "ngrpo/workbench/compare/plan.py",
        "test_compare_plan.py",
        ("len(plain) <= 80:", "len(plain) <= 800:", "plan: a folder's name is too long for a file system"),
    ),
    *of_file(
        "ngrpo/workbench/statistics.py",
        "test_significance.py",
        ("low <= 0.0 <= high", "low < 0.0 < high", "bootstrap: 0 at the end of an interval"),
    ),
    *of_file(
        "ngrpo/workbench/statistics.py",
        "test_report_samples.py",
        ("c / n >= tau", "c / n > tau", "cover: exactly the share is too few"),
    ),
    *of_file(
        "perturbations/replay/scope.py",
        "test_replay.py",
        ("(position < shape[1]) & (sample < shape[0])", "position < shape[1]", "a sample beyond the batch"),
        (
            "np.zeros((len(r), *shape)) if part is None",
            "np.ones((len(r), *shape)) if part is None",
            "a record without noise beside one with it has noise",
        ),
    ),
    *of_file(
        "perturbations/replay/trajectory.py",
        "test_replay.py",
        ("highest >= vocabulary", "highest > vocabulary", "replay: token V is one of V tokens"),
    ),
]
