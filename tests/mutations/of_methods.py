# SPDX-License-Identifier: Apache-2.0
"""Advantages, credits, policy noises, sampling schedules and second rounds."""

_FLAGS = "test_advantages_flags.py"
_FURTHER = "test_advantages_further.py"
_OBJECTIVES = "test_advantages_objectives.py"
_IN_LOSS = "test_credits_by_hand.py test_credits_loss.py"
_SECOND_ROUNDS, _SECOND_ROUNDS_TRAINING = "test_second_rounds.py", "test_second_rounds_training.py"

MUTATIONS = {
    ("ngrpo/methods/advantages/base.py", "test_advantages.py"): [
        ("= rewards - rewards[:, :1]", "= rewards", "group_norm: the float32 mean of equal rewards is not their value"),
        ("correction=min(1, rewards.shape[1] - 1)", "correction=0", "group_norm: the deviation of a population"),
        ("(apart - apart.mean(-1, keepdim=True))", "apart", "group_norm: the mean is not taken off"),
        (" / (deviation + 1e-9)", "", "group_norm: not divided by the deviation"),
        ("(~rewards.isfinite()).nonzero()", "rewards.isnan().nonzero()", "an infinite reward is let through"),
        ("complete = torch.zeros_like(rewards), ~overlong", "complete = rewards.clone(), ~overlong", "they keep r"),
        ("complete & (left == size)", "(left == size).expand_as(complete)", "overlong answers count in their groups"),
    ],
    ("ngrpo/methods/advantages/groupwise.py", "test_advantages.py"): [
        ("= rewards.shape[1] + self.n", "= rewards.shape[1]", "ngrpo: virtual answers are missing in the mean"),
        (" + self.n * mean.square()", "", "ngrpo: virtual answers are missing in the deviation"),
        ("(squares / (size - 1))", "(squares / size)", "ngrpo: the deviation of a population"),
        (".sqrt() + 1e-6)", ".sqrt() + 1e-9)", "ngrpo: another epsilon"),
        ("+ self.beta / (1.0 + seen.to(rewards.dtype)", "+ 1.0 / (1.0 + seen.to(rewards.dtype)", "copo: β is ignored"),
        ("(1.0 + seen.to", "(2.0 + seen.to", "copo: 2 + N in place of 1 + N"),
        ("(rewards.dtype)).sqrt()", "(rewards.dtype))", "copo: no square root"),
        ("rewards + self.beta", "rewards - self.beta", "copo: the bonus punishes"),
    ],
    ("ngrpo/methods/advantages/verified.py", "test_advantages.py"): [
        ("return rewards.clone()", "return rewards - 1.0", "psr: wrong answers count"),
        ("return rewards - 1.0", "return rewards.clone()", "nsr: correct answers count"),
        ("self.lam * rewards, rewards - 1.0", "rewards, rewards - 1.0", "w_reinforce: λ is ignored"),
        ("self.lam * rewards, rewards - 1.0", "self.lam * rewards, rewards", "w_reinforce: wrong answers do not count"),
        (
            "rewards >= 1.0 - ROUNDING, self",
            "rewards > 0.0, self",
            "w_reinforce: a partly correct answer counts as correct",
        ),
        (
            "torch.where(mixed, 2.0 * rewards",
            "torch.where(mixed, rewards",
            "reinforce_rej: a wrong answer has 0, not −1",
        ),
        (
            "> rewards.amin(-1, keepdim=True) + ROUNDING",
            ">= rewards.amin(-1, keepdim=True)",
            "reinforce_rej: uniform groups count",
        ),
        (
            "((mean - self.p) / (1.0 - 2.0 * self.p))",
            "(mean - self.p)",
            "s_grpo: the mean without errors is not scaled",
        ),
        ("return (1.0 - 2.0 * self.p) * (true", "return (true", "s_grpo: the factor 1 − 2p is missing"),
        (
            "(true * (1.0 - true) / observed).sqrt()",
            "(true * (1.0 - true) / observed)",
            "s_grpo: variances, not deviations",
        ),
        (".clamp(0.0, 1.0)", "", "s_grpo: the root of a negative number where errors explain the group"),
    ],
    ("ngrpo/methods/advantages/groupwise.py", _FLAGS): [
        ("below = rewards - self.max_reward", "below = rewards - 1.0", "ngrpo: max_reward is ignored"),
        ('("0.16", "0.24")', '("0.24", "0.16")', "ngrpo: the clip range the wrong way round"),
        ("{self.max_reward - self._rounding:.7f}", "{self.max_reward:.7f}", "ngrpo: 0.7 is not 0.7 in float32"),
        ("torch.where(below > -self._rounding, 0.0, below)", "below.clamp(max=0.0)", "ngrpo: sums miss the maximum"),
        ("ROUNDING * max(1.0, abs(self.max_reward))", "ROUNDING", "ngrpo: a large maximum is rounded more than that"),
        (':.7f}".rstrip("0").rstrip(".")', ':.9g}"', "ngrpo: argparse takes -1e-05 for a flag"),
    ],
    ("ngrpo/trainers/openrlhf/step_advantages.py", "test_advantages.py"): [
        ("[self._seen[key] - 1 for key in keys]", "[self._seen[key] for key in keys]", "copo: an answer counts itself"),
    ],
    ("ngrpo/trainers/common/mismatch.py", "test_measures.py"): [
        (
            "agreed=int(record.agreed[counted].sum())",
            "agreed=int(record.agreed.sum())",
            "anchor_agreement counts positions that its denominator leaves out",
        ),
    ],
    ("ngrpo/methods/advantages/best_of_k.py", _OBJECTIVES): [
        ("comb(n - c, k) / comb(n, k)", "((n - c) / n) ** k", "pass_at_k: groups are drawn with replacement"),
        ("comb(n - c - 1, k - 1) / comb(n - 1, k - 1)", "comb(n - c, k - 1) / comb(n, k - 1)", "pass_at_k: wrong ones"),
        ("(missed * (1.0 - missed)) ** 0.5", "missed * (1.0 - missed)", "pass_at_k: divided by the variance"),
        ("(1.0 - share) * _table(size, 1)", "share * _table(size, 1)", "pass_at_k: the combination's weights"),
        ("if deviation else [0.0, 0.0]", "if missed < 2 else [0.0, 0.0]", "pass_at_k: 0 / 0 where all are right"),
        ("comb(j - 1, k - 2) if k > 1", "comb(j, k - 2) if k > 1", "pkpo: the sets that a larger reward decides"),
        ("rank = j - (j > i)", "rank = j", "pkpo: the answer itself is among the others"),
        ("k / (n - 1) * comb(rank, k - 1)", "k / n * comb(rank, k - 1)", "pkpo: the weight of the baseline of k"),
        ("k / n * comb(rank, k - 2)", "comb(rank, k - 2)", "pkpo: the weight of the baseline of k - 1"),
        ("(rewards.shape[1] if self.scaled else 1.0)", "1.0", "pkpo: not scaled by the group's size"),
        ("scatter(-1, order, values)", "scatter(-1, order.argsort(-1), values)", "pkpo: values by rank, not by answer"),
        ("wide = wide - wide[:, :1]", "wide = wide * 1.0", "pkpo: equal rewards leave a rounding"),
        ("3.0 * _LARGEST * max", "1.0 * _LARGEST * max", "pkpo: loo is clipped"),
        ("rewards.abs() > _LARGEST", "rewards > _LARGEST", "pkpo: large negative rewards are clipped"),
    ],
    ("ngrpo/methods/advantages/base.py", _OBJECTIVES): [
        ("share * (self.k_end - self.k)", "share * (self.k - self.k_end)", "annealing goes the wrong way"),
        ("float(step >= self.k_steps)", "float(step > self.k_steps)", "annealing switches a step late"),
        ("step / self.k_steps", "step / (2 * self.k_steps)", "linear annealing at half the pace"),
    ],
    ("ngrpo/trainers/openrlhf/step_advantages.py", _FURTHER): [
        ("groups.reshape(-1)[order]", "groups.reshape(-1)", "answers get each other's advantages"),
        ("result[order] = values", "result[:] = values", "answers stand in each other's groups"),
        (".masked_fill(~mask, 0.0).sum(-1) for", ".sum(-1) for", "lens: padding counts"),
        ("(size**0.5 / advantage.dim) ** 0.5", "size**0.25", "rep_exp: the projection lengthens states"),
        ("(maker.args.train.seed, maker.training_step)", "(maker.args.train.seed)", "rep_exp: one projection for all"),
        ("(rho * right + sum(own), rho", "(right + sum(own), rho", "spo: right answers are never forgotten"),
        ("rho * wrong + len(own) - sum(own))", "rho * wrong + len(own))", "spo: right answers are wrong ones too"),
        ("(values[key] / (1.0 - rho), (1.0", "(values[key], (1.0", "spo: the first evidence has no weight"),
        ("if not isinstance(maker.visits, Values)", "if maker.visits is None", "spo: another advantage's state"),
        ("normalised(advantages.reshape(1, -1))", "normalised(advantages)", "spo: normalized over the group"),
    ],
    ("ngrpo/methods/advantages/groupwise.py", _OBJECTIVES): [
        ("torch.expm1(self.beta * below)", "torch.expm1(below)", "rs_grpo: β is missing in the exponent"),
        ("(1.0 + mean) / self.beta", "(1.0 + mean)", "rs_grpo: not divided by β"),
        ("(utility - mean) / (1.0 + mean)", "(utility - mean)", "rs_grpo: not divided by the group's mean"),
        ("(utility - mean)", "utility", "rs_grpo: 1 is not taken off"),
        ("rewards - rewards.amax(-1, keepdim=True)", "rewards * 1.0", "rs_grpo: large rewards overflow"),
        ("below - below.mean(-1, keepdim=True)", "below", "rs_grpo: no mean at β = 0"),
        ("return size / self.beta if", "return self.beta if", "rs_grpo: a rare right answer is clipped"),
    ],
    ("ngrpo/methods/advantages/verified.py", _OBJECTIVES): [
        ("keepdim=True)) / mean, 0.0)", "keepdim=True)), 0.0)", "maxrl: not divided by the mean"),
        ("torch.where(mean > 0.0, (apart", "torch.where(mean >= 0.0, (apart", "maxrl: 0 / 0 in all-wrong groups"),
        ("return size - 1.0", "return 0.0", "maxrl: a rare right answer is clipped"),
    ],
    ("ngrpo/methods/advantages/verified.py", _FURTHER): [
        ("confidence = (total / tokens).exp()", "confidence = total.exp()", "lens: long answers are never confident"),
        ("(difficulty - confidence) / rewards.shape[1]", "(difficulty - confidence)", "lens: not divided by G"),
        ("= 2.0 * confidence.amax", "= 1.5 * confidence.amax", "lens: the largest penalty is 2"),
        ("torch.maximum(difficulty, by_sampling)", "difficulty", "lens: D_imp is left out"),
        ("rewards * (-total).exp(), 0.0)", "rewards * (-total / tokens).exp(), 0.0)", "lens: D_imp of π̄, not π"),
        ("self.alpha * (calibrated", "(calibrated", "lens: α is ignored"),
        ("torch.where(rewards > 0.0, rewards * (", "torch.where(rewards > -1.0, rewards * (", "lens: 0 · ∞"),
        ("states = states - states.mean(1, keepdim=True)", "states = states * 1.0", "rep_exp: states are not centered"),
        ("kernel + self.ridge * torch", "kernel + torch", "rep_exp: λ is ignored"),
        ("rewards + self.beta * bonus", "rewards + bonus", "rep_exp: β is ignored"),
        (
            "normalised(torch.where(right, ",
            "normalised(torch.where(right | True, ",
            "rep_exp: a bonus where all are wrong",
        ),
    ],
    ("ngrpo/trainers/openrlhf/model_actors.py", _FURTHER): [
        ("[rows[sample == i] + 1 for", "[rows[sample == i] for", "rep_exp: the states that chose the tokens"),
    ],
    ("ngrpo/config/complete_flags.py", _OBJECTIVES): [
        ("if bound > 10 else", "if bound > 0 else", "a clip narrower than OpenRLHF's own"),
        ("compared += second.prompts", "compared += 0 * second.prompts", "a clip for the first round alone"),
    ],
    ("ngrpo/rollout/step_kernels.py", "test_gates_state.py"): [
        (
            "known = {}, draw.summary, hidden,",
            "known = {}, draw.summary, None,",
            "a gate's state is blind",
        ),
    ],
    ("ngrpo/methods/credits/token_credits.py", _IN_LOSS): [
        ("entropies > quantiles", "entropies < quantiles", "simko: where the policy is sure"),
        ("candidates.mean(dim=1) - tokens.log_probs[right]", "candidates.mean(dim=1)", "simko: the token keeps all"),
        ("candidates.mean(dim=1)", "candidates.sum(dim=1)", "simko: α for each of the K"),
        ("advantages > 0.0)", "advantages != 0.0)", "simko: a wrong answer raises the likeliest"),
        ("tokens.likeliest(wrong, 1).squeeze(1) == tokens.tokens[wrong]", "wrong >= 0", "simko: λ for every token"),
        ("torch.quantile(part, q)", "torch.quantile(values, q)", "simko: one quantile for all answers"),
        ("largest=False", "largest=True", "lp_reg: the likeliest tokens"),
        ("(log_probs <= threshold) & (tokens.advantages < 0.0)", "log_probs <= threshold", "lp_reg: right answers too"),
        ("math.ceil(self.share", "math.floor(1 + self.share", "lp_reg: a token too many"),
        (" - mass.log()", "", "lp_reg: the proxy is not renormalised"),
        ("torch.where(kept,", "torch.where(kept | True,", "lp_reg: noise is held up"),
        ("log_probs.detach() - mass", "log_probs - mass", "lp_reg: the proxy has a gradient"),
    ],
    ("ngrpo/methods/credits/base.py", _IN_LOSS): [
        (", sparse_grad=True", "", "a gradient of the logits' size"),
        ("scores[:, :-1] - scores[:, -1:]", "scores[:, :-1]", "candidates without the token's own score"),
    ],
    ("ngrpo/methods/credits/covariance.py", _IN_LOSS): [
        ("(advantages - advantages.mean())", "advantages", "covariance: the mean advantage is not taken off"),
        ("found >= self.low", "found > self.low", "clip_cov: the lower bound itself is left out"),
        ("found <= self.high", "found < self.high", "clip_cov: the upper bound itself is left out"),
        ("tokens.positions[inside]", "inside", "clip_cov: the choice depends on the order of the responses"),
        ("tokens.seeds[inside]", "0 * inside", "clip_cov: the same positions in every step"),
        ("max(1, int(share", "max(0, int(share", "covariance: no token of a small step"),
        ("self.beta * log_ratio.abs()", "log_ratio.abs()", "kl_cov: β is missing"),
        ("log_ratio.abs()", "log_ratio", "kl_cov: the penalty pushes down"),
    ],
    ("ngrpo/trainers/common/policy_loss.py", _IN_LOSS): [
        (
            "self._loss(old_log_probs - scores",
            "self._loss(log_probs - scores",
            "the penalty is clipped, and A = 1 trained",
        ),
        ("alone - alone.detach()", "alone", "the logged loss has the penalty's −1"),
        ("term - term.detach()", "term", "the term moves the ratio"),
        ("attention_mask.shape[1] - 1 - action", "attention_mask.shape[1] - action", "the row after the token"),
        (
            "position, shape, attention_mask)",
            "position, attention_mask.shape, attention_mask)",
            "packed rows as padded",
        ),
    ],
    ("ngrpo/methods/credits/token_credits.py", "test_credits.py"): [
        ("entropies >= threshold", "entropies > threshold", "top_entropy: the smallest of the top is left out"),
        ("math.ceil(self.fraction", "math.floor(self.fraction", "top_entropy: rounded down"),
        ("entropies.topk(", "(-entropies).topk(", "top_entropy: the smallest entropies"),
        ("advantages, 0.0)", "advantages, 0.1 * advantages)", "top_entropy: the others keep a part"),
        (
            "torch.minimum(self.alpha * tokens.entropies, advantages.abs() / self.kappa)",
            "self.alpha * tokens.entropies",
            "entropy_bonus: no bound",
        ),
        ("self.alpha * tokens.entropies,", "tokens.entropies,", "entropy_bonus: α is missing"),
        ("advantages.abs() / self", "advantages / self", "entropy_bonus: the bound of a negative advantage"),
        ("/ self.kappa", "/ 2.0", "entropy_bonus: κ is missing"),
        ("/ torch.bincount(answer)", "", "first_token: the sum and not the mean"),
        ('torch.where(positive, mean, -torch.inf), "amax"', 'mean, "amax"', "first_token: a wrong answer is the best"),
        ("(winner < len(first)) &", "True &", "first_token: groups without a right answer lose theirs"),
        ("silent & positive", "silent", "first_token: wrong answers lose theirs though they should keep it"),
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
        ("output.entropy[:, -log_probs.shape[1] :]", "output.entropy[:, : log_probs.shape[1]]", "of other tokens"),
    ],
    ("ngrpo/methods/policy_noises/weight_noises.py", "test_policy_noises.py"): [
        ("(stage - 1) / last_exponent", "stage / last_exponent", "aqn: the first noisy stage is below σ_s"),
        ("self.end / self.start", "self.start / self.end", "aqn: σ rises"),
        ('(1 if self.form == "paper" else 2)', "1", "aqn: the released exponent"),
        ("(self.steps or steps)", "steps", "aqn: its own number of steps is ignored"),
        ("divergence < self.target", "divergence > self.target", "psn: σ away from the target"),
        ("last / self.factor", "last * (2.0 - self.factor)", "psn: not divided"),
        ("min(max(sigma, _LEAST), _MOST)", "sigma", "psn: no bounds"),
    ],
    ("ngrpo/machine/upstream/openrlhf_flags.py", "test_policy_noises.py"): [
        ('("0", "10")', '("0", "2")', "psn: another bound of the weight"),
    ],
    ("ngrpo/machine/upstream/openrlhf_flags.py", "test_sampling_schedules.py"): [
        ('("0", "10")', '("0", "1")', "weights above 1 are cut"),
    ],
    ("ngrpo/methods/policy_noises/base.py", "test_policy_noises.py"): [
        ("parameter.data.copy_(clean[name])\n", "pass\n", "the trainer keeps the noise"),
        ("+ scale * noise", "+ noise", "noise without its scale"),
        ('"policy noise", self.seed, sync, name', '"policy noise", self.seed, name', "the same noise in every sync"),
        ('noise", self.seed, sync, name', 'noise", self.seed, sync', "the same noise in every parameter"),
    ],
    ("ngrpo/trainers/openrlhf/trainer.py", "test_policy_noises.py"): [
        ("            self.send_weights(0.0)\n", "", "noisy evaluation"),
        ("if self.noise[0] != self.noise_step:", "if self.noise[1] is None:", "σ is chosen once"),
    ],
    ("ngrpo/trainers/common/mismatch.py", "test_policy_noises.py"): [
        ('"divergence": -log_ratio.mean()', '"divergence": log_ratio.mean()', "the sign of the divergence"),
        ("weight.clamp(*bounds) if", "weight if", "the mean of weights that are not cut"),
        ("| (weight > bounds[1])", "", "what is above the bounds does not count as cut"),
    ],
    ("ngrpo/methods/sampling_schedules/temperatures.py", "test_sampling_schedules.py"): [
        ("self.growth * step", "self.growth", "ead: d does not grow with the training"),
        ("at.generated < self.c", "at.generated <= self.c", "ead: one token too many at temperature 1"),
        ('"released": 20.0', '"released": 1.0', "ead: the released exponent"),
        (".clamp_max(_SLOWEST)", "", "ead: d grows for ever"),
        (".clamp_min(self.tau_min)", "", "ead: no lowest temperature"),
        ('"released": 1}', '"released": 0}', "ead: the release's first step is its step 0"),
        ("self.theta / at.entropies()", "self.theta * at.entropies()", "edt: hot where the model is sure"),
        ("self.t_0 * ", "", "edt: T_0 is missing"),
        ("math.log(target / last)", "math.log(last / target)", "e3: away from the target"),
        ("run.temperature * past[-1].factor *", "past[-1].factor *", "e3: τ is taken for its factor"),
        ("+ math.log(math.log(run.vocabulary))", "", "e3: ln ln V is missing"),
        ("0.5 * (1.0 + math.cos(math.pi * x))", "(1.0 - x)", "e3: the target falls evenly"),
        (
            "min(since / (run.steps - start), 1.0)",
            "since / (run.steps - start)",
            "e3: beyond the run it rises again",
        ),
        ("since = len(past) - 1 - start", "since = len(past) - start", "e3: the target is a step ahead"),
        ("(at.answers - 1).clamp_min(1)", "at.answers", "ladder: the last answer is not the hottest"),
        ("at.answers > 1", "at.answers > 0", "ladder: an only answer is cold"),
        ("(self.most / self.least) ** share", "(1.0 + (self.most / self.least - 1.0) * share)", "ladder: even steps"),
    ],
    ("ngrpo/trainers/openrlhf/rollout_actor.py", "test_sampling_schedules_run.py"): [
        ("% seeds.MOST_ANSWERS % arguments", "% arguments", "ladder: a round's first answer is not number 0"),
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
        ("not perturbation.samples_text or", "True or", "a text that is not sampled passes for one that is"),
    ],
    ("perturbations/methods/neighbor.py", "test_sampled_text.py"): [
        ('return self.realization == "sampled"', "return True", "the anchor passes for a sampled token"),
    ],
    ("ngrpo/rollout/sample_tokens.py", "test_drawn_tokens.py"): [
        (".clamp_max(1.0 - 2.0**-24)", "", "the only token allowed may lose to token 0"),
    ],
    ("ngrpo/rollout/perturber.py", "test_sampling_schedules_run.py"): [
        ("self._store.answers[self._slots].T", "self._store.answers[: len(names)].T", "ladder: by row, not by slot"),
        ("(steps >= 0) & (greedy < 0)", "(steps >= 0)", "greedy requests follow the schedule"),
        (
            "np.maximum(batch.next_positions - self._store.prompts[batch.slots], 0)",
            "batch.next_positions",
            "the prompt's tokens count as generated",
        ),
    ],
    ("ngrpo/trainers/openrlhf/samples_generator.py", "test_sampling_schedules_run.py"): [
        ('if "training_step" in arguments and', "if", "ladder: evaluations follow it"),
        ("max(self.rollout_round - 1, 0)", "self.rollout_round", "the first step is step 1"),
        ('kwargs.get("temperature", 1.0) * self.temperature_factor', 'kwargs["temperature"]', "e3 changes nothing"),
        ("schedule.evaluation or not self.evaluating", "True", "evaluations follow every schedule"),
    ],
    ("ngrpo/trainers/openrlhf/trainer.py", "test_sampling_schedules_run.py"): [
        ("[astuple(step) for step in self.past_steps]", "[]", "a resumed run forgets the first step's entropy"),
    ],
    ("ngrpo/trainers/openrlhf/experience_maker.py", "test_sampling_schedules_run.py"): [
        ("[part[e.action_mask.bool()]", "[part.flatten()", "padding has an entropy"),
    ],
    ("ngrpo/trainers/common/mismatch.py", "test_correction_warmup.py"): [
        (".exp().clamp(*bounds)", ".exp()", "a weight grows beyond its bounds"),
        ("(strength * (weight - 1.0)).log1p()", "strength * weight.log()", "log weights are interpolated"),
    ],
    ("ngrpo/trainers/openrlhf/experience_maker.py", "test_correction_warmup.py"): [
        ("min(1.0, maker.training_step / steps)", "1.0", "the weights are whole from the first step"),
    ],
    ("ngrpo/methods/second_rounds/base.py", _SECOND_ROUNDS): [
        ("max(rewards) <= self.wrong", "min(rewards) <= self.wrong", "one wrong answer is enough for a second round"),
        ("right if len(right) < size", "right if len(right) <= size", "no wrong answer stays"),
        ("ratio = log_probs - behavior", "ratio = behavior - log_probs", "ρ upside down"),
        (".log().to(ratio) - ratio)", ".to(ratio) - ratio)", "γ itself in the place of its logarithm"),
        ("return prompt.rindex(end)", "return prompt.index(end)", "the draft in the first message"),
        ("return max(lengths)", "return lengths[-1]", "nonsense before the template's own system message"),
    ],
    ("ngrpo/methods/second_rounds/lope.py", _SECOND_ROUNDS): [
        ("random.randint(self.least, self.most)", "self.most", "lope: always the longest"),
        ("at = opening(text, tokenizer)", "at = 0", "lope: before the template"),
        ("return self.most + _SEAMS", "return self.least", "lope: no room for the longest"),
    ],
    ("ngrpo/methods/second_rounds/igrpo.py", _SECOND_ROUNDS): [
        ("best = max(reward", "best = min(reward", "igrpo: the worst draft"),
        ("random.choice(", "min(", "igrpo: always the same of equal drafts"),
        ("if reward == best", "", "igrpo: any draft"),
    ],
    ("ngrpo/methods/second_rounds/igrpo.py", _SECOND_ROUNDS_TRAINING): [
        ("        return {}", "        return super().flags(flags)", "igrpo: no KL term"),
    ],
    ("ngrpo/trainers/openrlhf/rollout_actor.py", "test_gap_scale.py"): [
        (" and not second_round.drafting.get()", "", "controls follow drafts, and are lost with them"),
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
        ("second_round is not None and not self.evaluating", "second_round is not None", "one in an evaluation"),
    ],
    ("ngrpo/trainers/openrlhf/experience_maker.py", _SECOND_ROUNDS_TRAINING): [
        ("of_both[:, -later:]", "of_both", "right drafts count as right refinements"),
        ("drafts.max(-1)", "of_both.max(-1)", "the best refinement as the best draft"),
    ],
    ("ngrpo/trainers/openrlhf/step_advantages.py", _SECOND_ROUNDS_TRAINING): [
        ("whole[places] = rewards[row]", "pass", "penalties are lost"),
    ],
    ("ngrpo/trainers/common/policy_loss.py", _SECOND_ROUNDS_TRAINING): [
        ("log_ratio.detach().exp().to(advantages)", "1.0", "shaping has no weight"),
        (
            "torch.where(second, old_log_probs, rollout_log_probs)",
            "rollout_log_probs",
            "the rollout's weight taken twice",
        ),
        ("            log_ratio = log_ratio - log_ratio.detach()\n", "", "ρ is taken twice"),
    ],
}
