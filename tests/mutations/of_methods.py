# SPDX-License-Identifier: Apache-2.0
"""Advantages, credits, policy noises, sampling schedules and second rounds."""

_BEST = "test_advantages_best_of_k.py"
_ORDER = "test_advantages_order.py"
_RISK = "test_advantages_rs_grpo.py"
_IN_LOSS = "test_credits_simko.py"
_PENALTIES = "test_credits_penalties.py"
_LADDER = "test_sampling_schedules_ladder.py"
_SECOND_ROUNDS, _SECOND_ROUNDS_TRAINING = "test_second_rounds.py", "test_second_rounds_training.py"

MUTATIONS = {
    ("ngrpo/methods/advantages/base.py", "test_advantages.py"): [
        ("= rewards - rewards[:, :1]", "= rewards", "group_norm: the float32 mean of equal rewards is not their value"),
        ("correction=min(1, rewards.shape[1] - 1)", "correction=0", "group_norm: the deviation of a population"),
        ("(apart - apart.mean(-1, keepdim=True))", "apart", "group_norm: the mean is not taken off"),
        ("(~rewards.isfinite()).nonzero()", "rewards.isnan().nonzero()", "an infinite reward is let through"),
        ("complete = torch.zeros_like(rewards), ~overlong", "complete = rewards.clone(), ~overlong", "they keep r"),
        ("complete & (left == size)", "(left == size).expand_as(complete)", "overlong answers count in their groups"),
    ],
    ("ngrpo/methods/advantages/groupwise.py", "test_advantages.py"): [
        (" + self.n * mean.square()", "", "ngrpo: virtual answers are missing in the deviation"),
        ("below = rewards - self.max_reward", "below = rewards - 1.0", "ngrpo: max_reward is ignored"),
        ("+ self.beta / (1.0 + seen.to(rewards.dtype)", "+ 1.0 / (1.0 + seen.to(rewards.dtype)", "copo: β is ignored"),
    ],
    ("ngrpo/methods/advantages/verified.py", "test_advantages.py"): [
        ("return rewards.clone()", "return rewards - 1.0", "psr: wrong answers count"),
        ("return rewards - 1.0", "return rewards.clone()", "nsr: correct answers count"),
        ("self.lam * rewards, rewards - 1.0", "self.lam * rewards, rewards", "w_reinforce: wrong answers do not count"),
        (" >= 1.0 - ROUNDING, self", " > 0.0, self", "w_reinforce: a partly correct answer counts as correct"),
        (".where(mixed, 2.0 * rewards", ".where(mixed, rewards", "reinforce_rej: a wrong answer has 0, not −1"),
        ("> rewards.amin(-1, keepdim=True", ">= rewards.amin(-1, keepdim=True", "reinforce_rej: uniform groups count"),
        ("return (1.0 - 2.0 * self.p) * (true", "return (true", "s_grpo: the factor 1 − 2p is missing"),
        (".clamp(0.0, 1.0)", "", "s_grpo: the root of a negative number where errors explain the group"),
    ],
    ("ngrpo/methods/advantages/groupwise.py", "test_advantages_flags.py"): [
        ('("0.16", "0.24")', '("0.24", "0.16")', "ngrpo: the clip range the wrong way round")
    ],
    ("ngrpo/trainers/openrlhf/step_advantages.py", "test_advantages.py"): [
        ("[self._seen[key] - 1 for key in keys]", "[self._seen[key] for key in keys]", "copo: an answer counts itself")
    ],
    ("ngrpo/trainers/common/mismatch.py", "test_measures.py"): [
        (".agreed[counted].sum(", ".agreed.sum(", "anchor_agreement counts positions that its denominator leaves out")
    ],
    ("ngrpo/methods/advantages/best_of_k.py", _BEST): [
        ("comb(n - c, k) / comb(n, k)", "((n - c) / n) ** k", "pass_at_k: groups are drawn with replacement"),
        ("comb(n - c - 1, k - 1) / comb(n - 1, k - 1)", "comb(n - c, k - 1) / comb(n, k - 1)", "pass_at_k: wrong ones"),
        ("if deviation else [0.0, 0.0]", "if missed < 2 else [0.0, 0.0]", "pass_at_k: 0 / 0 where all are right"),
        ("comb(j - 1, k - 2) if k > 1", "comb(j, k - 2) if k > 1", "pkpo: the sets that a larger reward decides"),
        ("rank = j - (j > i)", "rank = j", "pkpo: the answer itself is among the others"),
        ("k / (n - 1) * comb(rank, k - 1)", "k / n * comb(rank, k - 1)", "pkpo: the weight of the baseline of k"),
        ("scatter(-1, order, values)", "scatter(-1, order.argsort(-1), values)", "pkpo: values by rank, not by answer"),
        ("wide = wide - wide[:, :1]", "wide = wide * 1.0", "pkpo: equal rewards leave a rounding"),
    ],
    ("ngrpo/methods/advantages/base.py", _BEST): [
        ("float(step >= self.k_steps)", "float(step > self.k_steps)", "annealing switches a step late"),
        ("k=round(self.k", "k=int(self.k", "a linear k is cut off, not rounded"),
    ],
    ("ngrpo/methods/advantages/groupwise.py", _ORDER): [
        ("{self.max_reward - self._rounding:.7f}", "{self.max_reward:.7f}", "ngrpo: 0.7 is not 0.7 in float32"),
        ("torch.where(below > -self._rounding, 0.0, below)", "below.clamp(max=0.0)", "ngrpo: sums miss the maximum"),
        ("ROUNDING * max(1.0, abs(self.max_reward))", "ROUNDING", "ngrpo: a large maximum is rounded more than that"),
        (':.7f}".rstrip("0").rstrip(".")', ':.9g}"', "ngrpo: argparse takes -1e-05 for a flag"),
    ],
    ("ngrpo/methods/advantages/best_of_k.py", _ORDER): [
        ("3.0 * _LARGEST * max", "1.0 * _LARGEST * max", "pkpo: loo is clipped"),
        ("rewards.abs() > _LARGEST", "rewards > _LARGEST", "pkpo: large negative rewards are clipped"),
    ],
    ("ngrpo/trainers/openrlhf/step_advantages.py", _ORDER): [
        ("groups.reshape(-1)[order]", "groups.reshape(-1)", "answers get each other's advantages"),
        ("result[order] = values", "result[:] = values", "answers stand in each other's groups"),
    ],
    ("ngrpo/methods/advantages/groupwise.py", _RISK): [
        ("(utility - mean) / (1.0 + mean)", "(utility - mean)", "rs_grpo: not divided by the group's mean"),
        ("rewards - rewards.amax(-1, keepdim=True)", "rewards * 1.0", "rs_grpo: large rewards overflow"),
        ("below - below.mean(-1, keepdim=True)", "below", "rs_grpo: no mean at β = 0"),
        ("return size / self.beta if", "return self.beta if", "rs_grpo: a rare right answer is clipped"),
    ],
    ("ngrpo/methods/advantages/verified.py", "test_advantages_maxrl.py"): [
        ("torch.where(mean > 0.0, (apart", "torch.where(mean >= 0.0, (apart", "maxrl: 0 / 0 in all-wrong groups"),
        ("return size - 1.0", "return 0.0", "maxrl: a rare right answer is clipped"),
    ],
    ("ngrpo/methods/advantages/verified.py", "test_advantages_lens.py"): [
        ("confidence = (total / tokens).exp()", "confidence = total.exp()", "lens: long answers are never confident"),
        ("torch.maximum(difficulty, by_sampling)", "difficulty", "lens: D_imp is left out"),
        ("rewards * (-total).exp(), 0.0)", "rewards * (-total / tokens).exp(), 0.0)", "lens: D_imp of π̄, not π"),
        ("torch.where(rewards > 0.0, rewards * (", "torch.where(rewards > -1.0, rewards * (", "lens: 0 · ∞"),
    ],
    ("ngrpo/trainers/openrlhf/step_advantages.py", "test_advantages_lens.py"): [
        (".masked_fill(~mask, 0.0).sum(-1) for", ".sum(-1) for", "lens: padding counts")
    ],
    ("ngrpo/methods/advantages/verified.py", "test_advantages_rep_exp.py"): [
        ("normalised(torch.where(right", "normalised(torch.where(right | True", "rep_exp: a bonus where all are wrong"),
    ],
    ("ngrpo/trainers/openrlhf/model_actors.py", "test_advantages_rep_exp.py"): [
        ("[rows[sample == i] + 1 for", "[rows[sample == i] for", "rep_exp: the states that chose the tokens")
    ],
    ("ngrpo/trainers/openrlhf/step_advantages.py", "test_advantages_rep_exp.py"): [
        ("(size**0.5 / advantage.dim) ** 0.5", "size**0.25", "rep_exp: the projection lengthens states"),
        ("(maker.args.train.seed, maker.training_step)", "(maker.args.train.seed)", "rep_exp: one projection for all"),
    ],
    ("ngrpo/trainers/openrlhf/step_advantages.py", "test_advantages_spo.py"): [
        ("(rho * right + sum(own), rho", "(right + sum(own), rho", "spo: right answers are never forgotten"),
        ("(values[key] / (1.0 - rho), (1.0", "(values[key], (1.0", "spo: the first evidence has no weight"),
        ("if not isinstance(maker.visits, Values)", "if maker.visits is None", "spo: another advantage's state"),
        ("normalised(advantages.reshape(1, -1))", "normalised(advantages)", "spo: normalized over the group"),
    ],
    ("ngrpo/config/complete_flags.py", "test_advantages_maxrl.py"): [
        ("if bound > 10 else", "if bound > 0 else", "a clip narrower than OpenRLHF's own"),
        ("compared += second.prompts", "compared += 0 * second.prompts", "a clip for the first round alone"),
    ],
    ("ngrpo/rollout/step_kernels.py", "test_gates_state.py"): [
        ("known = {}, draw.summary, hidden,", "known = {}, draw.summary, None,", "a gate's state is blind")
    ],
    ("ngrpo/methods/credits/token_credits.py", _IN_LOSS): [
        ("candidates.mean(dim=1) - tokens.log_probs[right]", "candidates.mean(dim=1)", "simko: the token keeps all"),
        ("advantages > 0.0)", "advantages != 0.0)", "simko: a wrong answer raises the likeliest"),
        ("tokens.likeliest(wrong, 1).squeeze(1) == tokens.tokens[wrong]", "wrong >= 0", "simko: λ for every token"),
        ("torch.quantile(part, q)", "torch.quantile(values, q)", "simko: one quantile for all answers"),
    ],
    ("ngrpo/methods/credits/base.py", _IN_LOSS): [
        (", sparse_grad=True", "", "a gradient of the logits' size"),
        ("scores[:, :-1] - scores[:, -1:]", "scores[:, :-1]", "candidates without the token's own score"),
        ("rows.split(size)", "[rows]", "credits: the entropies of a batch in one block"),
    ],
    ("ngrpo/methods/credits/covariance.py", _PENALTIES): [
        ("(advantages - advantages.mean())", "advantages", "covariance: the mean advantage is not taken off"),
        ("found >= self.low", "found > self.low", "clip_cov: the lower bound itself is left out"),
        ("found <= self.high", "found < self.high", "clip_cov: the upper bound itself is left out"),
        ("tokens.positions[inside]", "inside", "clip_cov: the choice depends on the order of the responses"),
        ("tokens.seeds[inside]", "0 * inside", "clip_cov: the same positions in every step"),
        ("max(1, int(share", "max(0, int(share", "covariance: no token of a small step"),
        ("log_ratio.abs()", "log_ratio", "kl_cov: the penalty pushes down"),
    ],
    ("ngrpo/methods/credits/token_credits.py", _PENALTIES): [
        ("(log_probs <= threshold) & (tokens.advantages < 0.0)", "log_probs <= threshold", "lp_reg: right answers too"),
        ("math.ceil(self.share", "math.floor(1 + self.share", "lp_reg: a token too many"),
        ("torch.where(kept,", "torch.where(kept | True,", "lp_reg: noise is held up"),
        ("log_probs.detach() - mass", "log_probs - mass", "lp_reg: the proxy has a gradient"),
    ],
    ("ngrpo/trainers/common/policy_loss.py", _PENALTIES): [
        ("._loss(old_log_probs - scores", "._loss(log_probs - scores", "the penalty is clipped, and A = 1 trained"),
        ("alone - alone.detach()", "alone", "the logged loss has the penalty's −1"),
    ],
    ("ngrpo/trainers/common/policy_loss.py", _IN_LOSS): [
        ("term - term.detach()", "term", "the term moves the ratio"),
        ("attention_mask.shape[1] - 1 - action", "attention_mask.shape[1] - action", "the row after the token"),
        ("position, shape, attention_mask", "position, attention_mask.shape, attention_mask", "packed rows as padded"),
    ],
    ("ngrpo/methods/credits/token_credits.py", "test_credits.py"): [
        ("entropies >= threshold", "entropies > threshold", "top_entropy: the smallest of the top is left out"),
        ("math.ceil(self.fraction", "math.floor(self.fraction", "top_entropy: rounded down"),
        (
            "torch.minimum(self.alpha * tokens.entropies, advantages.abs() / self.kappa)",
            "self.alpha * tokens.entropies",
            "entropy_bonus: no bound",
        ),
        ("advantages.abs() / self", "advantages / self", "entropy_bonus: the bound of a negative advantage"),
        ('torch.where(positive, mean, -torch.inf), "amax"', 'mean, "amax"', "first_token: a wrong answer is the best"),
        ("(winner < len(first)) &", "True &", "first_token: groups without a right answer lose theirs"),
        ("silent & positive", "silent", "first_token: wrong answers lose theirs though they should keep it"),
        (".unique(return_inverse=True)[1]", "", "first_token: an empty answer before the last group aborts the step"),
    ],
    ("ngrpo/trainers/openrlhf/step_advantages.py", "test_credits.py"): [
        ("maker.training_step, place) for", "maker.training_step, 0) for", "credits: all responses have one seed"),
        (
            "torch.cat([h[mask.cpu()] for h, mask in zip(entropies, masks)])",
            "torch.cat([h.flatten() for h in entropies])[: len(advantages)]",
            "padding is counted among the tokens",
        ),
    ],
    ("ngrpo/trainers/openrlhf/model_actors.py", "test_credits.py"): [
        ("output.entropy[:, -log_probs.shape[1] :]", "output.entropy[:, : log_probs.shape[1]]", "of other tokens")
    ],
    ("ngrpo/methods/policy_noises/weight_noises.py", "test_policy_noises.py"): [
        ("(stage - 1) / last_exponent", "stage / last_exponent", "aqn: the first noisy stage is below σ_s"),
        ('(1 if self.form == "paper" else 2)', "1", "aqn: the released exponent"),
        ("(self.steps or steps)", "steps", "aqn: its own number of steps is ignored"),
        ("last / self.factor", "last * (2.0 - self.factor)", "psn: not divided"),
        ("min(max(sigma, _LEAST), _MOST)", "sigma", "psn: no bounds"),
    ],
    ("ngrpo/machine/upstream/openrlhf_flags.py", "test_policy_noises.py"): [
        ('("0", "10")', '("0", "2")', "psn: another bound of the weight")
    ],
    ("ngrpo/machine/upstream/openrlhf_flags.py", "test_sampling_schedules.py"): [
        ('("0", "10")', '("0", "1")', "weights above 1 are cut")
    ],
    ("ngrpo/methods/policy_noises/base.py", "test_policy_noises.py"): [
        ("parameter.data.copy_(clean[name])\n", "pass\n", "the trainer keeps the noise"),
        ('"policy noise", self.seed, sync, name', '"policy noise", self.seed, name', "the same noise in every sync"),
        ('noise", self.seed, sync, name', 'noise", self.seed, sync', "the same noise in every parameter"),
    ],
    ("ngrpo/trainers/openrlhf/trainer.py", "test_policy_noises.py"): [
        ("            self.send_weights(0.0)\n", "", "noisy evaluation"),
        ("if self.noise[0] != self.noise_step:", "if self.noise[1] is None:", "σ is chosen once"),
    ],
    ("ngrpo/trainers/common/mismatch.py", "test_policy_noises.py"): [
        ('"divergence": -log_ratio.mean()', '"divergence": log_ratio.mean()', "the sign of the divergence"),
        ("weight.clamp(bounds.low, bounds.high) if", "weight if", "the mean of weights that are not cut"),
        ("| (weight > bounds.high)", "", "what is above the bounds does not count as cut"),
        ("(weight < bounds.low) | ", "", "importance: the lower bound is ignored"),
    ],
    ("ngrpo/methods/sampling_schedules/temperatures.py", "test_sampling_schedules.py"): [
        ("at.generated < self.c", "at.generated <= self.c", "ead: one token too many at temperature 1"),
        (".clamp_max(_SLOWEST)", "", "ead: d grows for ever"),
        ('"released": 1}', '"released": 0}', "ead: the release's first step is its step 0"),
        ("self.theta / at.entropies()", "self.theta * at.entropies()", "edt: hot where the model is sure"),
        ("run.temperature * past[-1].factor *", "past[-1].factor *", "e3: τ is taken for its factor"),
        ("min(since / (run.steps - start), 1.0)", "since / (run.steps - start)", "e3: beyond the run it rises again"),
        ("since = len(past) - 1 - start", "since = len(past) - start", "e3: the target is a step ahead"),
    ],
    ("ngrpo/methods/sampling_schedules/temperatures.py", _LADDER): [
        ("(at.answers - 1).clamp_min(1)", "at.answers", "ladder: the last answer is not the hottest"),
        ("at.answers > 1", "at.answers > 0", "ladder: an only answer is cold"),
        ("(self.most / self.least) ** share", "(1.0 + (self.most / self.least - 1.0) * share)", "ladder: even steps"),
    ],
    ("ngrpo/trainers/openrlhf/rollout_actor.py", _LADDER): [
        ("% seeds.MOST_ANSWERS % arguments", "% arguments", "ladder: a round's first answer is not number 0")
    ],
    ("ngrpo/trainers/openrlhf/samples_generator.py", _LADDER): [
        ('if "training_step" in arguments and', "if", "ladder: evaluations follow it")
    ],
    ("ngrpo/rollout/perturber.py", _LADDER): [
        ("self._store.answers[self._slots].T", "self._store.answers[: len(names)].T", "ladder: by row, not by slot")
    ],
    ("ngrpo/methods/sampling_schedules/base.py", "test_sampling_schedules.py"): [
        ("self.logits * self.temperature.unsqueeze(-1)", "self.logits", "the entropy is that at the temperature asked"),
        (".sum(dim=-1).abs()", ".sum(dim=-1).neg()", "an entropy of -0, by which edt divides"),
    ],
    ("ngrpo/config/features.py", "test_sampled_text.py"): [
        ("or made.samples_text:", "or True:", "weights of tokens that were not drawn from the policy"),
        ("if replace(made, **{entry.name: choice}).samples_text:", "if False:", "no way out is named"),
    ],
    ("perturbations/testing/proposal.py", "test_sampled_text.py"): [
        ("not perturbation.samples_text or", "True or", "a text that is not sampled passes for one that is")
    ],
    ("perturbations/methods/neighbor.py", "test_sampled_text.py"): [
        ('return self.realization == "sampled"', "return True", "the anchor passes for a sampled token")
    ],
    ("ngrpo/rollout/sample_tokens.py", "test_forced_tokens.py"): [
        (".clamp_max(1.0 - 2.0**-24)", "", "the only token allowed may lose to token 0")
    ],
    ("ngrpo/rollout/perturber.py", "test_sampling_schedules_run.py"): [
        ("(steps >= 0) & (greedy < 0)", "(steps >= 0)", "greedy requests follow the schedule"),
        (" - self._store.prompts[batch.slots], 0)", ", 0)", "the prompt's tokens count as generated"),
    ],
    ("ngrpo/trainers/openrlhf/samples_generator.py", "test_sampling_schedules_run.py"): [
        ("max(self.rollout_round - 1, 0)", "self.rollout_round", "the first step is step 1"),
        ('kwargs.get("temperature", 1.0) * self.temperature_factor', 'kwargs["temperature"]', "e3 changes nothing"),
        ("schedule.evaluation or not self.evaluating", "True", "evaluations follow every schedule"),
    ],
    ("ngrpo/trainers/openrlhf/trainer.py", "test_sampling_schedules_run.py"): [
        ("[astuple(step) for step in self.past_steps]", "[]", "a resumed run forgets the first step's entropy")
    ],
    ("ngrpo/trainers/openrlhf/experience_maker.py", "test_sampling_schedules_run.py"): [
        ("[part[e.action_mask.bool()]", "[part.flatten()", "padding has an entropy")
    ],
    ("ngrpo/trainers/common/mismatch.py", "test_correction_warmup.py"): [
        (".clamp(*bounds)", "", "a weight grows beyond its bounds"),
        ("(strength * (weight - 1.0)).log1p()", "strength * weight.log()", "log weights are interpolated"),
    ],
    ("ngrpo/trainers/openrlhf/experience_maker.py", "test_correction_warmup.py"): [
        ("min(1.0, maker.training_step / steps)", "1.0", "the weights are whole from the first step")
    ],
    ("ngrpo/methods/second_rounds/base.py", _SECOND_ROUNDS): [
        ("max(rewards) <= self.wrong", "min(rewards) <= self.wrong", "one wrong answer is enough for a second round"),
        ("right if len(right) < size", "right if len(right) <= size", "no wrong answer stays"),
        (".log().to(ratio) - ratio)", ".to(ratio) - ratio)", "γ itself in the place of its logarithm"),
        ("return prompt.rindex(end)", "return prompt.index(end)", "the draft in the first message"),
        ("return max(lengths)", "return lengths[-1]", "nonsense before the template's own system message"),
    ],
    ("ngrpo/methods/second_rounds/lope.py", _SECOND_ROUNDS): [
        ("at = opening(text, tokenizer)", "at = 0", "lope: before the template"),
        ("return self.most + _SEAMS", "return self.least", "lope: no room for the longest"),
        ("add_special_tokens=False)) <= length", "add_special_tokens=False)) <= length + 1", "lope: a token too many"),
    ],
    ("ngrpo/methods/second_rounds/igrpo.py", _SECOND_ROUNDS): [
        ("best = max(reward", "best = min(reward", "igrpo: the worst draft"),
        ("random.choice(", "min(", "igrpo: always the same of equal drafts"),
    ],
    ("ngrpo/methods/second_rounds/igrpo.py", _SECOND_ROUNDS_TRAINING): [
        ("        return {}", "        return super().flags(flags)", "igrpo: no KL term")
    ],
    ("ngrpo/trainers/openrlhf/rollout_actor.py", "test_gap_scale.py"): [
        (" and not second_round.drafting.get()", "", "controls follow drafts, and are lost with them")
    ],
    ("ngrpo/trainers/openrlhf/second_round.py", _SECOND_ROUNDS): [
        (' - require(sampling_params.max_tokens, "a response\'s length")', "", "a refinement without room"),
        ("max_length if method.refines else max_length", "max_length", "a draft beyond max_len"),
        ("(second, len(first)) if", "(first, 0) if", "drafts are trained"),
        ("    drafting.set(False)\n", "", "no control follows a refinement"),
        ("len(first) + number, np", "number, np", "an answer has the first round's place"),
        ("(list(response[name][start:end])", "(list(response[name])", "the prompt of the second round is trained"),
        ("else max_length + extra for", "else max_length for", "less room for the second round's answers"),
    ],
    ("ngrpo/trainers/openrlhf/samples_generator.py", _SECOND_ROUNDS): [
        ("second_round is not None and not self.evaluating", "second_round is not None", "one in an evaluation")
    ],
    ("ngrpo/trainers/openrlhf/experience_maker.py", _SECOND_ROUNDS_TRAINING): [
        ("rewards[:, -later:]", "rewards", "right drafts count as right refinements"),
        ("drafts.max(-1)", "rewards.max(-1)", "the best refinement as the best draft"),
    ],
    ("ngrpo/trainers/openrlhf/step_advantages.py", _SECOND_ROUNDS_TRAINING): [
        ("whole[places] = rewards[row]", "pass", "penalties are lost")
    ],
    ("ngrpo/trainers/common/policy_loss.py", _SECOND_ROUNDS_TRAINING): [
        ("log_ratio.detach().exp().to(advantages)", "1.0", "shaping has no weight"),
        ("torch.where(second, old_log_probs, ", "(", "the rollout's weight taken twice"),
        ("            log_ratio = log_ratio - log_ratio.detach()\n", "", "ρ is taken twice"),
    ],
}
