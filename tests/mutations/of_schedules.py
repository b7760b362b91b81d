# SPDX-License-Identifier: Apache-2.0
"""Sampling schedules."""

from __future__ import annotations

from tests.mutations.mutation import of_file

_LADDER = "test_sampling_schedules_ladder.py"

SCHEDULES = [
    *of_file(
        "ngrpo/methods/sampling_schedules/temperatures.py",
        "test_sampling_schedules.py",
        ("self.growth * step", "self.growth", "ead: d does not grow with the training"),
        ("at.generated < self.c", "at.generated <= self.c", "ead: one token too many at temperature 1"),
        ('"released": 20.0', '"released": 1.0', "ead: the released exponent"),
        (".clamp_max(_SLOWEST)", "", "ead: d grows for ever"),
        (".clamp_min(self.tau_min)", "", "ead: no lowest temperature"),
        ('"released": 1}', '"released": 0}', "ead: the release's first step is its step 0"),
    ),
    *of_file(
        "ngrpo/methods/sampling_schedules/temperatures.py",
        "test_sampling_schedules.py",
        ("self.theta / at.entropies()", "self.theta * at.entropies()", "edt: hot where the model is sure"),
        ("self.t_0 * ", "", "edt: T_0 is missing"),
    ),
    *of_file(
        "ngrpo/methods/sampling_schedules/temperatures.py",
        _LADDER,
        ("(at.answers - 1).clamp_min(1)", "at.answers", "ladder: the last answer is not the hottest"),
        ("at.answers > 1", "at.answers > 0", "ladder: an only answer is cold"),
        ("(self.most / self.least) ** share", "(1.0 + (self.most / self.least - 1.0) * share)", "ladder: even steps"),
    ),
    *of_file(
        "ngrpo/trainers/openrlhf/rollout_actor.py",
        _LADDER,
        ("% seeds.MOST_ANSWERS % arguments", "% arguments", "ladder: a round's first answer is not number 0"),
    ),
    *of_file(
        "ngrpo/trainers/openrlhf/samples_generator.py",
        _LADDER,
        ('if "training_step" in arguments and', "if", "ladder: evaluations follow it"),
    ),
    *of_file(
        "ngrpo/rollout/perturber.py",
        _LADDER,
        ("self._store.answers[self._slots].T", "self._store.answers[: len(names)].T", "ladder: by row, not by slot"),
    ),
    *of_file(
        "ngrpo/methods/sampling_schedules/base.py",
        "test_sampling_schedules.py",
        ("self.logits * self.temperature.unsqueeze(-1)", "self.logits", "the entropy is that at the temperature asked"),
        ('("0", "10")', '("0", "1")', "weights above 1 are cut"),
        (".sum(dim=-1).abs()", ".sum(dim=-1).neg()", "an entropy of -0, by which edt divides"),
    ),
    *of_file(
        "ngrpo/methods/sampling_schedules/temperatures.py",
        "test_sampling_schedules.py",
        ("math.log(target / last)", "math.log(last / target)", "e3: away from the target"),
        ("run.temperature * past[-1].factor *", "past[-1].factor *", "e3: τ is taken for its factor"),
        ("+ math.log(math.log(run.vocabulary))", "", "e3: ln ln V is missing"),
        ("0.5 * (1.0 + math.cos(math.pi * x))", "(1.0 - x)", "e3: the target falls evenly"),
        ("min(since / (steps - start), 1.0)", "since / (steps - start)", "e3: beyond the run the target rises again"),
        ("since = past - 1 - start", "since = past - start", "e3: the target is a step ahead"),
    ),
    *of_file(
        "ngrpo/config/features.py",
        "test_sampled_text.py",
        ("or made.samples_text:", "or True:", "weights of tokens that were not drawn from the policy"),
        ("if replace(made, **{entry.name: choice}).samples_text:", "if False:", "no way out is named"),
    ),
    *of_file(
        "perturbations/testing/proposal.py",
        "test_sampled_text.py",
        (
            "not perturbation.samples_text or torch",
            "True or torch",
            "a text that is not sampled passes for one that is",
        ),
    ),
    *of_file(
        "perturbations/methods/neighbor.py",
        "test_sampled_text.py",
        ('return self.realization == "sampled"', "return True", "the anchor passes for a sampled token"),
    ),
    *of_file(
        "ngrpo/rollout/sample_tokens.py",
        "test_forced_tokens.py",
        (".clamp_max(1.0 - 2.0**-24)", "", "the only token allowed may lose to token 0"),
    ),
    *of_file(
        "ngrpo/rollout/perturber.py",
        "test_sampling_schedules_run.py",
        ("(steps >= 0) & (greedy < 0)", "(steps >= 0)", "greedy requests follow the schedule"),
        (
            "np.maximum(batch.next_positions - self._store.prompts[batch.slots], 0)",
            "batch.next_positions",
            "the prompt's tokens count as generated",
        ),
    ),
    *of_file(
        "ngrpo/trainers/openrlhf/samples_generator.py",
        "test_sampling_schedules_run.py",
        ("max(self.rollout_round - 1, 0)", "self.rollout_round", "the first step is step 1"),
        ('kwargs.get("temperature", 1.0) * self.temperature_factor', 'kwargs["temperature"]', "e3 changes nothing"),
        ("schedule.evaluation or not self.evaluating", "True", "evaluations follow every schedule"),
    ),
    *of_file(
        "ngrpo/trainers/openrlhf/trainer.py",
        "test_sampling_schedules_run.py",
        ("[astuple(step) for step in self.past_steps]", "[]", "a resumed run forgets the first step's entropy"),
    ),
    *of_file(
        "ngrpo/trainers/openrlhf/experience_maker.py",
        "test_sampling_schedules_run.py",
        ("[part[e.action_mask.bool()]", "[part.flatten()", "padding has an entropy"),
    ),
    *of_file(
        "ngrpo/trainers/common/mismatch.py",
        "test_correction_warmup.py",
        (".clamp(*bounds)", "", "a weight grows beyond its bounds"),
        ("(strength * (weight - 1.0)).log1p()", "strength * weight.log()", "log weights are interpolated"),
    ),
    *of_file(
        "ngrpo/trainers/openrlhf/experience_maker.py",
        "test_correction_warmup.py",
        ("min(1.0, maker.training_step / steps)", "1.0", "the weights are whole from the first step"),
    ),
]
