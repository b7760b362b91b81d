# SPDX-License-Identifier: Apache-2.0
"""Advantages, credits, policy noises, sampling schedules and second rounds."""

_FLAGS = "config/test_advantages_flags.py"
_FURTHER = "methods/advantages/test_advantages_further.py"
_OBJECTIVES = "methods/advantages/test_advantages_objectives.py"
_IN_LOSS = "methods/credits/test_credits_by_hand.py methods/credits/test_credits_loss.py"
_CENTERING = "trainers/common/test_score_centering.py"
_SECOND_ROUNDS = "methods/second_rounds/test_second_rounds.py"
_SECOND_ROUNDS_TRAINING = "methods/second_rounds/test_second_rounds_training.py"

MUTATIONS = {
    ("ngrpo/methods/advantages/base.py", "methods/advantages/test_advantages.py"): [
        ("= rewards - rewards[:, :1]", "= rewards", "group_norm: the float32 mean of equal rewards is not their value"),
        ("correction=min(1, rewards.shape[1] - 1)", "correction=0", "group_norm: the deviation of a population"),
        (
            "complete & (group_sizes == size)",
            "(group_sizes == size).expand_as(complete)",
            "overlong answers count in their groups",
        ),
    ],
    ("ngrpo/methods/advantages/groupwise.py", "methods/advantages/test_advantages.py"): [
        (" + self.n * mean.square()", "", "ngrpo: virtual answers are missing in the deviation"),
        ("(1.0 + counts)", "(2.0 + counts)", "copo: 2 + N in place of 1 + N"),
        ("(1.0 + counts).sqrt()", "(1.0 + counts)", "copo: no square root"),
    ],
    ("ngrpo/methods/advantages/verified.py", "methods/advantages/test_advantages.py"): [
        ("return rewards.clone()", "return rewards - 1.0", "psr: wrong answers count"),
        ("return rewards - 1.0", "return rewards.clone()", "nsr: correct answers count"),
        ("self.lam * rewards, rewards - 1.0", "rewards, rewards - 1.0", "w_reinforce: λ is ignored"),
        (
            "> rewards.amin(-1, keepdim=True) + ROUNDING",
            ">= rewards.amin(-1, keepdim=True)",
            "reinforce_rej: uniform groups count",
        ),
        ("weight = (1.0 - 2.0 * self.p) * (true", "weight = (true", "s_grpo: the factor 1 − 2p is missing"),
    ],
    ("ngrpo/methods/advantages/groupwise.py", _FLAGS): [
        ("below_maximum = rewards - self.max_reward", "below_maximum = rewards - 1.0", "ngrpo: max_reward is ignored"),
        ('("0.16", "0.24")', '("0.24", "0.16")', "ngrpo: the clip range the wrong way round"),
        ("{self.max_reward - self._rounding:.7f}", "{self.max_reward:.7f}", "ngrpo: 0.7 is not 0.7 in float32"),
    ],
    ("ngrpo/trainers/openrlhf/step_advantages.py", "methods/advantages/test_advantages_of_step.py"): [
        ("[self._seen[key] - 1 for key in keys]", "[self._seen[key] for key in keys]", "copo: an answer counts itself"),
    ],
    ("ngrpo/trainers/common/mismatch.py", "trainers/common/test_step_metrics.py"): [
        (
            "agreed=int(record.agreed[is_counted].sum())",
            "agreed=int(record.agreed.sum())",
            "sampled_token_kept counts positions that its denominator leaves out",
        ),
    ],
    ("ngrpo/methods/advantages/best_of_k.py", _OBJECTIVES): [
        ("comb(n - c, k) / comb(n, k)", "((n - c) / n) ** k", "pass_at_k: groups are drawn with replacement"),
        ("(no_right * (1.0 - no_right)) ** 0.5", "no_right * (1.0 - no_right)", "pass_at_k: divided by the variance"),
        ("sets = comb(j - 1, k - 2)", "sets = comb(j, k - 2)", "pkpo: the sets that a larger reward decides"),
        (
            "scatter(-1, order, by_rank)",
            "scatter(-1, order.argsort(-1), by_rank)",
            "pkpo: values by rank, not by answer",
        ),
    ],
    ("ngrpo/methods/advantages/base.py", _OBJECTIVES): [
        ("share * (self.k_end - self.k)", "share * (self.k - self.k_end)", "annealing goes the wrong way"),
    ],
    ("ngrpo/trainers/openrlhf/step_advantages.py", _FURTHER): [
        ("groups.reshape(-1)[self._numbers]", "groups.reshape(-1)", "answers get each other's advantages"),
        (".masked_fill(~mask, 0.0).sum(-1)", ".sum(-1)", "lens: padding counts"),
        ("(size**0.5 / advantage.dim) ** 0.5", "size**0.25", "rep_exp: the projection lengthens states"),
        ("right = rho * right + sum(", "right = right + sum(", "spo: right answers are never forgotten"),
        ("normalised(advantages.reshape(1, -1))", "normalised(advantages)", "spo: normalized over the group"),
    ],
    ("ngrpo/methods/advantages/groupwise.py", _OBJECTIVES): [
        ("torch.expm1(self.beta * below_best)", "torch.expm1(below_best)", "rs_grpo: β is missing in the exponent"),
        ("(utility - mean) / (1.0 + mean)", "(utility - mean)", "rs_grpo: not divided by the group's mean"),
    ],
    ("ngrpo/methods/advantages/verified.py", _OBJECTIVES): [
        ("centered / mean, 0.0)", "centered, 0.0)", "maxrl: not divided by the mean"),
    ],
    ("ngrpo/methods/advantages/verified.py", _FURTHER): [
        (
            "confidence = (log_prob / tokens).exp()",
            "confidence = log_prob.exp()",
            "lens: long answers are never confident",
        ),
        ("(difficulty - confidence) / rewards.shape[1]", "(difficulty - confidence)", "lens: not divided by G"),
        ("states = states - states.mean(1, keepdim=True)", "states = states * 1.0", "rep_exp: states are not centered"),
        ("kernel + self.ridge * identity", "kernel + identity", "rep_exp: λ is ignored"),
    ],
    ("ngrpo/trainers/openrlhf/model_actors.py", _FURTHER): [
        ("rows[samples == sample] + 1", "rows[samples == sample]", "rep_exp: the states that chose the tokens"),
    ],
    ("ngrpo/config/complete_run.py", _OBJECTIVES): [
        ("if bound <= 10:", "if bound <= 0:", "a clip narrower than OpenRLHF's own"),
    ],
    ("ngrpo/methods/credits/token_credits.py", _IN_LOSS): [
        ("entropies > quantiles", "entropies < quantiles", "simko: where the policy is sure"),
        (
            "log_probs_of_likeliest.mean(dim=1) - tokens.log_probs[right]",
            "log_probs_of_likeliest.mean(dim=1)",
            "simko: the token keeps all",
        ),
        ("largest=False", "largest=True", "lp_reg: the likeliest tokens"),
        ("log_probs.detach() - mass", "log_probs - mass", "lp_reg: the proxy has a gradient"),
    ],
    ("ngrpo/methods/credits/base.py", _IN_LOSS): [
        ("scores[:, :-1] - scores[:, -1:]", "scores[:, :-1]", "candidates without the token's own score"),
    ],
    ("ngrpo/methods/credits/covariance.py", _IN_LOSS): [
        ("(advantages - advantages.mean())", "advantages", "covariance: the mean advantage is not taken off"),
        ("covariance <= self.high", "covariance < self.high", "clip_cov: the upper bound itself is left out"),
        ("self.beta * log_ratio.abs()", "log_ratio.abs()", "kl_cov: β is missing"),
    ],
    ("ngrpo/trainers/common/policy_loss.py", _IN_LOSS): [
        ("term - term.detach()", "term", "the term moves the ratio"),
        ("(sample, position - 1, shape", "(sample, position, shape", "the row after the token"),
    ],
    ("ngrpo/trainers/common/score_centering.py", _CENTERING): [
        ("weighted.sum(dim=-1, keepdim=True) * policy", "policy", "centering: coefficients that sum to 1"),
        ("ratio.clamp(self.low, self.high)", "ratio", "centering: weights without bounds"),
        ("ratio, 0.0)\n        return", "ratio, 1.0)\n        return", "centering: dropped weights are 1"),
        ("* (sampler.temperature / temperature)", "* torch.ones_like(temperature)", "centering: e3's temperature"),
        ("request_logits / factor", "request_logits * factor", "centering: a hot schedule is taken for a cold one"),
        ("position - records[sample].prompt_tokens", "position", "centering: the prompt's tokens are generated ones"),
        (
            "position in perturbed_by_sample[sample]\n",
            "draws_text\n",
            "centering: every position is the perturbation's",
        ),
        ("ids is not None and not sampler.corrects_mask", "False", "centering: q of the filters is forgotten"),
        ("old_log_probs - mean_of_scores", "old_log_probs + mean_of_scores", "centering: the mean is added"),
        ("(centering_loss - centering_loss.detach())", "centering_loss", "centering: the logged loss moves"),
        (
            "rollout_log_probs=old_log_probs,",
            "rollout_log_probs=rollout_log_probs,",
            "centering: the mean is weighted twice",
        ),
        ("abs().sum() / (2 * token_count)", "abs().sum() / (2 * len(scores))", "centering: removed of a block"),
    ],
    ("perturbations/methods/token_draws.py", _CENTERING): [
        ("is_candidate &= left.gather(-1, ids)\n", "pass\n", "cuts: q of tokens that were cut"),
        ("torch.where(count > 0, uniform, filtered_policy)", "uniform", "cuts: q is 0 where the filters left none"),
        ("self._are_candidates(values * temperature", "self._are_candidates(values", "cuts: δ at another temperature"),
    ],
    ("ngrpo/trainers/openrlhf/rollout_actor.py", _CENTERING): [
        (
            "run.sampling.score_centering and not run.sampling.correct_mask,",
            "False,",
            "centering: the mismatch is measured against log-probabilities of the tokens left",
        ),
        ("temperature=conversation.sampling[", "temperature=1.0 or [", "centering: a request without its temperature"),
    ],
    ("ngrpo/methods/credits/token_credits.py", "methods/credits/test_credits.py"): [
        ("entropies.topk(", "(-entropies).topk(", "top_entropy: the smallest entropies"),
        ("/ self.kappa", "/ 2.0", "entropy_bonus: κ is missing"),
        (
            'torch.where(is_positive, means, -torch.inf), "amax"',
            'means, "amax"',
            "first_token: a wrong answer is the best",
        ),
    ],
    ("ngrpo/trainers/openrlhf/step_credits.py", "methods/credits/test_credits.py"): [
        ("maker.training_step, number) for", "maker.training_step, 0) for", "credits: all responses have one seed"),
    ],
    ("ngrpo/trainers/openrlhf/model_actors.py", "methods/credits/test_credits.py"): [
        ("output.entropy[:, -log_probs.shape[1] :]", "output.entropy[:, : log_probs.shape[1]]", "of other tokens"),
    ],
    ("ngrpo/methods/policy_noises/weight_noises.py", "methods/policy_noises/test_policy_noises.py"): [
        ("self.end / self.start", "self.start / self.end", "aqn: σ rises"),
        ("divergence < self.target", "divergence > self.target", "psn: σ away from the target"),
    ],
    ("ngrpo/methods/policy_noises/base.py", "methods/policy_noises/test_policy_noises.py"): [
        ("parameter.data.copy_(clean_values[name])\n", "pass\n", "the trainer keeps the noise"),
        ('"policy noise", self.seed, sync, name', '"policy noise", self.seed, name', "the same noise in every sync"),
    ],
    ("ngrpo/trainers/openrlhf/trainer.py", "methods/policy_noises/test_policy_noises.py"): [
        ("        self.send_weights(0.0)\n", "", "noisy evaluation"),
    ],
    ("ngrpo/trainers/common/mismatch.py", "methods/policy_noises/test_policy_noises.py"): [
        ("-log_ratio.mean()", "log_ratio.mean()", "the sign of the divergence"),
        ("weights.clamp(low, high)", "weights", "the mean of weights that are not cut"),
    ],
    ("ngrpo/methods/sampling_schedules/temperatures.py", "methods/sampling_schedules/test_sampling_schedules.py"): [
        ("self.growth * s)", "self.growth)", "ead: d does not grow with the training"),
        ("at.generated < self.c", "at.generated <= self.c", "ead: one token too many at temperature 1"),
        ("self.theta / at.entropies()", "self.theta * at.entropies()", "edt: hot where the model is sure"),
        ("math.log(target / last_entropy)", "math.log(last_entropy / target)", "e3: away from the target"),
        ("0.5 * (1.0 + math.cos(math.pi * x))", "(1.0 - x)", "e3: the target falls evenly"),
        ("(self.most / self.least) ** share", "(1.0 + (self.most / self.least - 1.0) * share)", "ladder: even steps"),
    ],
    ("ngrpo/methods/sampling_schedules/base.py", "methods/sampling_schedules/test_sampling_schedules.py"): [
        ("self.logits * self.temperature.unsqueeze(-1)", "self.logits", "the entropy is that at the temperature asked"),
    ],
    ("ngrpo/config/features.py", "perturbations/test_sampled_text.py"): [
        ("or perturbation.samples_text:", "or True:", "weights of tokens that were not drawn from the policy"),
    ],
    ("perturbations/testing/proposal.py", "perturbations/test_sampled_text.py"): [
        ("not perturbation.samples_text or", "True or", "a text that is not sampled passes for one that is"),
    ],
    ("perturbations/testing/log_density.py", "perturbations/testing/test_proposal.py"): [
        ("mean_gradient <= _MEAN_GRADIENT,", "True,", "a density of another temperature passes"),
        ("gain >= 0.0,", "True,", "a density of the wrong sign passes"),
        ("excess[token] <= 2.0 / _DRAWS,", "True,", "probabilities of another text pass"),
    ],
    ("perturbations/testing/waits.py", "config/test_method_checks.py"): [
        ('tensor.device.type != "cpu"', "True", "a result on the CPU passes"),
    ],
    ("perturbations/methods/neighbor.py", "perturbations/test_sampled_text.py"): [
        ('return self.realization == "sampled"', "return True", "the anchor passes for a sampled token"),
    ],
    ("ngrpo/rollout/sample_tokens.py", "rollout/test_sample_tokens.py"): [
        (".clamp_max(1.0 - 2.0**-24)", "", "the only token allowed may lose to token 0"),
    ],
    ("ngrpo/rollout/scheduled_temperatures.py", "methods/sampling_schedules/test_sampling_schedules_run.py"): [
        ("numbers_and_counts[slots].T", "numbers_and_counts[: len(slots)].T", "ladder: by row, not by slot"),
        ("applies = applies & (greedy < 0)", "pass", "greedy requests follow the schedule"),
    ],
    ("ngrpo/trainers/openrlhf/samples_generator.py", "methods/sampling_schedules/test_sampling_schedules_run.py"): [
        ("max(self.rollout_round - 1, 0)", "self.rollout_round", "the first step is step 1"),
        ("schedule.evaluation or not self.evaluating", "True", "evaluations follow every schedule"),
    ],
    ("ngrpo/trainers/openrlhf/trainer.py", "methods/sampling_schedules/test_sampling_schedules_run.py"): [
        ("[astuple(step) for step in self.past_steps]", "[]", "a resumed run forgets the first step's entropy"),
    ],
    ("ngrpo/trainers/openrlhf/trainer.py", "config/test_resume.py"): [
        ('states["episode"] += 1', "pass", "a resumed run trains the complete episode once more"),
    ],
    ("ngrpo/trainers/openrlhf/experience_maker.py", "methods/sampling_schedules/test_sampling_schedules_run.py"): [
        (
            "experience.rollout_log_probs[compared]",
            "experience.rollout_log_probs.flatten()",
            "padding has an entropy",
        ),
    ],
    ("ngrpo/trainers/openrlhf/experience_maker.py", "methods/second_rounds/test_second_rounds_measures.py"): [
        (" & ~is_second\n", "\n", "responses to another prompt are compared"),
    ],
    ("ngrpo/trainers/common/mismatch.py", "config/test_correction_warmup.py"): [
        (".exp().clamp(*bounds)", ".exp()", "a weight grows beyond its bounds"),
        ("(strength * (weight - 1.0)).log1p()", "strength * weight.log()", "log weights are interpolated"),
    ],
    ("ngrpo/trainers/openrlhf/experience_maker.py", "config/test_correction_warmup.py"): [
        ("min(1.0, maker.training_step / steps)", "1.0", "the weights are whole from the first step"),
    ],
    ("ngrpo/methods/second_rounds/base.py", _SECOND_ROUNDS): [
        ("if len(right) < size", "if len(right) <= size", "no wrong answer stays"),
        ("ratio = log_probs - behavior", "ratio = behavior - log_probs", "ρ upside down"),
    ],
    ("ngrpo/methods/second_rounds/lope.py", _SECOND_ROUNDS): [
        ("start = opening(text, tokenizer)", "start = 0", "lope: before the template"),
    ],
    ("ngrpo/methods/second_rounds/igrpo.py", _SECOND_ROUNDS): [
        ("best_reward = max(reward", "best_reward = min(reward", "igrpo: the worst draft"),
    ],
    ("ngrpo/methods/second_rounds/igrpo.py", _SECOND_ROUNDS_TRAINING): [
        ("        return {}", "        return super().flags(flags)", "igrpo: no KL term"),
    ],
    ("ngrpo/trainers/openrlhf/second_round.py", _SECOND_ROUNDS): [
        ("in enumerate(second)]", "in enumerate(first)]", "drafts are trained"),
        (
            'list(response["observation_tokens"][start:end])',
            'list(response["observation_tokens"])',
            "the prompt of the second round is trained",
        ),
    ],
    ("ngrpo/trainers/openrlhf/samples_generator.py", _SECOND_ROUNDS): [
        ("second_round is not None and not self.evaluating", "second_round is not None", "one in an evaluation"),
    ],
    ("ngrpo/trainers/openrlhf/experience_maker.py", _SECOND_ROUNDS_TRAINING): [
        ("all_rewards[:, -second_count:]", "all_rewards", "right drafts count as right refinements"),
    ],
    ("ngrpo/trainers/openrlhf/step_advantages.py", _SECOND_ROUNDS_TRAINING): [
        ("all_rewards[places] = own_rewards", "pass", "penalties are lost"),
    ],
    ("ngrpo/trainers/common/policy_loss.py", _SECOND_ROUNDS_TRAINING): [
        ("log_ratio.detach().exp().to(advantages)", "1.0", "shaping has no weight"),
        ("            log_ratio = log_ratio - log_ratio.detach()\n", "", "ρ is taken twice"),
    ],
}
