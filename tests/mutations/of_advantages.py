# SPDX-License-Identifier: Apache-2.0
"""Advantages, credits and policy noises."""

from __future__ import annotations

from tests.mutations.mutation import Mutation, of_file

ADVANTAGES = [
    Mutation(
        "ngrpo/methods/advantages/base.py",
        "    apart = rewards - rewards[:, :1]",
        "    apart = rewards",
        "test_advantages.py",
        "group_norm: the float32 mean of equal rewards is not their value",
    ),
    Mutation(
        "ngrpo/methods/advantages/base.py",
        "correction=min(1, rewards.shape[1] - 1)",
        "correction=0",
        "test_advantages.py",
        "group_norm: the deviation of a population",
    ),
    Mutation(
        "ngrpo/methods/advantages/base.py",
        "(apart - apart.mean(-1, keepdim=True))",
        "apart",
        "test_advantages.py",
        "group_norm: the mean is not taken off",
    ),
    Mutation(
        "ngrpo/methods/advantages/base.py",
        " / (deviation + 1e-9)",
        "",
        "test_advantages.py",
        "group_norm: not divided by the deviation",
    ),
    Mutation(
        "ngrpo/methods/advantages/base.py",
        "(~rewards.isfinite()).nonzero()",
        "rewards.isnan().nonzero()",
        "test_advantages.py",
        "an infinite reward is let through",
    ),
    Mutation(
        "ngrpo/methods/advantages/groupwise.py",
        "size = rewards.shape[1] + self.n",
        "size = rewards.shape[1]",
        "test_advantages.py",
        "ngrpo: virtual answers are missing in the mean",
    ),
    Mutation(
        "ngrpo/methods/advantages/groupwise.py",
        " + self.n * mean.square()",
        "",
        "test_advantages.py",
        "ngrpo: virtual answers are missing in the deviation",
    ),
    Mutation(
        "ngrpo/methods/advantages/groupwise.py",
        "(squares / (size - 1))",
        "(squares / size)",
        "test_advantages.py",
        "ngrpo: the deviation of a population",
    ),
    Mutation(
        "ngrpo/methods/advantages/groupwise.py",
        ".sqrt() + 1e-6)",
        ".sqrt() + 1e-9)",
        "test_advantages.py",
        "ngrpo: another epsilon",
    ),
    Mutation(
        "ngrpo/methods/advantages/groupwise.py",
        "below = rewards - self.max_reward",
        "below = rewards - 1.0",
        "test_advantages.py",
        "ngrpo: max_reward is ignored",
    ),
    Mutation(
        "ngrpo/methods/advantages/groupwise.py",
        '("0.16", "0.24")',
        '("0.24", "0.16")',
        "test_advantages_flags.py",
        "ngrpo: the clip range the wrong way round",
    ),
    Mutation(
        "ngrpo/methods/advantages/groupwise.py",
        "return rewards.clone()",
        "return rewards - 1.0",
        "test_advantages.py",
        "psr: wrong answers count",
    ),
    Mutation(
        "ngrpo/methods/advantages/groupwise.py",
        "return rewards - 1.0",
        "return rewards.clone()",
        "test_advantages.py",
        "nsr: correct answers count",
    ),
    Mutation(
        "ngrpo/methods/advantages/groupwise.py",
        "self.lam * rewards, rewards - 1.0",
        "rewards, rewards - 1.0",
        "test_advantages.py",
        "w_reinforce: λ is ignored",
    ),
    Mutation(
        "ngrpo/methods/advantages/groupwise.py",
        "self.lam * rewards, rewards - 1.0",
        "self.lam * rewards, rewards",
        "test_advantages.py",
        "w_reinforce: wrong answers do not count",
    ),
    Mutation(
        "ngrpo/methods/advantages/groupwise.py",
        "rewards >= 1.0 - ROUNDING",
        "rewards > 0.0",
        "test_advantages.py",
        "w_reinforce: a partly correct answer counts as correct",
    ),
    Mutation(
        "ngrpo/methods/advantages/groupwise.py",
        "rewards + self.beta / (1.0 + seen.to(rewards.dtype)).sqrt()",
        "rewards + 1.0 / (1.0 + seen.to(rewards.dtype)).sqrt()",
        "test_advantages.py",
        "copo: β is ignored",
    ),
    Mutation(
        "ngrpo/methods/advantages/groupwise.py",
        "(1.0 + seen.to",
        "(2.0 + seen.to",
        "test_advantages.py",
        "copo: 2 + N in place of 1 + N",
    ),
    Mutation(
        "ngrpo/methods/advantages/groupwise.py",
        "(rewards.dtype)).sqrt()",
        "(rewards.dtype))",
        "test_advantages.py",
        "copo: no square root",
    ),
    Mutation(
        "ngrpo/methods/advantages/groupwise.py",
        "rewards + self.beta",
        "rewards - self.beta",
        "test_advantages.py",
        "copo: the bonus punishes",
    ),
    Mutation(
        "ngrpo/trainers/openrlhf/step_advantages.py",
        "return [self._seen[key] - 1 for key in keys]",
        "return [self._seen[key] for key in keys]",
        "test_advantages.py",
        "copo: an answer counts itself",
    ),
    Mutation(
        "ngrpo/trainers/common/mismatch.py",
        "agreed += int(record.agreed[counted].sum())",
        "agreed += int(record.agreed.sum())",
        "test_measures.py",
        "anchor_agreement counts positions that its denominator leaves out",
    ),
]

_BEST = "test_advantages_best_of_k.py"

BEST_OF_K = [
    *of_file(
        "ngrpo/methods/advantages/best_of_k.py",
        _BEST,
        ("comb(n - c, k) / comb(n, k)", "((n - c) / n) ** k", "pass_at_k: groups are drawn with replacement"),
        (
            "comb(n - c - 1, k - 1) / comb(n - 1, k - 1)",
            "comb(n - c, k - 1) / comb(n, k - 1)",
            "pass_at_k: wrong ones",
        ),
        ("(missed * (1.0 - missed)) ** 0.5", "missed * (1.0 - missed)", "pass_at_k: divided by the variance"),
        ("(1.0 - share) * _table(size, 1)", "share * _table(size, 1)", "pass_at_k: the combination's weights"),
        (
            "if deviation else [0.0, 0.0]",
            "if missed < 2 else [0.0, 0.0]",
            "pass_at_k: 0 / 0 where all are right",
        ),
    ),
    *of_file(
        "ngrpo/methods/advantages/best_of_k.py",
        _BEST,
        ("comb(j - 1, k - 2) if k > 1", "comb(j, k - 2) if k > 1", "pkpo: the sets that a larger reward decides"),
        ("rank = j - (j > i)", "rank = j", "pkpo: the answer itself is among the others"),
        (
            "k / (n - 1) * comb(rank, k - 1)",
            "k / n * comb(rank, k - 1)",
            "pkpo: the weight of the baseline of k",
        ),
        ("k / n * comb(rank, k - 2)", "comb(rank, k - 2)", "pkpo: the weight of the baseline of k - 1"),
        ("(rewards.shape[1] if self.scaled else 1.0)", "1.0", "pkpo: not scaled by the group's size"),
        ("scatter(-1, order, values)", "scatter(-1, order.argsort(-1), values)", "pkpo: values by rank, not by answer"),
        ("wide = wide - wide[:, :1]", "wide = wide * 1.0", "pkpo: equal rewards leave a rounding"),
    ),
    *of_file(
        "ngrpo/methods/advantages/base.py",
        _BEST,
        ("share * (self.k_end - self.k)", "share * (self.k - self.k_end)", "annealing goes the wrong way"),
        ("float(step >= self.k_steps)", "float(step > self.k_steps)", "annealing switches a step late"),
        ("step / self.k_steps", "step / (2 * self.k_steps)", "linear annealing at half the pace"),
    ),
]

_ORDER, _RISK = "test_advantages_order.py", "test_advantages_rs_grpo.py"

AT_THE_BOUND = [
    *of_file(
        "ngrpo/methods/advantages/groupwise.py",
        _ORDER,
        ("{self.max_reward - self._rounding:.7f}", "{self.max_reward:.7f}", "ngrpo: 0.7 is not 0.7 in float32"),
        ("torch.where(below > -self._rounding, 0.0, below)", "below.clamp(max=0.0)", "ngrpo: sums miss the maximum"),
        ("ROUNDING * max(1.0, abs(self.max_reward))", "ROUNDING", "ngrpo: a large maximum is rounded more than that"),
        (':.7f}".rstrip("0").rstrip(".")', ':.9g}"', "ngrpo: argparse takes -1e-05 for a flag"),
    ),
    *of_file(
        "ngrpo/methods/advantages/best_of_k.py",
        _ORDER,
        ("3 * _LARGEST * max", "_LARGEST * max", "pkpo: loo is clipped"),
        ("rewards.abs() > _LARGEST", "rewards > _LARGEST", "pkpo: large negative rewards are clipped"),
    ),
    *of_file(
        "ngrpo/trainers/openrlhf/step_advantages.py",
        _ORDER,
        ("groups.reshape(-1)[order]", "groups.reshape(-1)", "answers get each other's advantages"),
        ("result[order] = values", "result[:] = values", "answers stand in each other's groups"),
    ),
]

RISK = of_file(
    "ngrpo/methods/advantages/groupwise.py",
    _RISK,
    ("torch.expm1(self.beta * below)", "torch.expm1(below)", "rs_grpo: β is missing in the exponent"),
    ("(1.0 + mean) / self.beta", "(1.0 + mean)", "rs_grpo: not divided by β"),
    ("(utility - mean) / (1.0 + mean)", "(utility - mean)", "rs_grpo: not divided by the group's mean"),
    ("(utility - mean)", "utility", "rs_grpo: 1 is not taken off"),
    ("rewards - rewards.amax(-1, keepdim=True)", "rewards * 1.0", "rs_grpo: large rewards overflow"),
    ("below - below.mean(-1, keepdim=True)", "below", "rs_grpo: no mean at β = 0"),
    ("if largest > 10.0:", "if largest > 1e9:", "rs_grpo: a rare right answer is clipped"),
)

OVERLONG = of_file(
    "ngrpo/methods/advantages/base.py",
    "test_advantages.py",
    (
        "result, complete = torch.zeros_like(rewards), ~overlong",
        "result, complete = rewards.clone(), ~overlong",
        "they keep r",
    ),
    ("complete & (left == size)", "(left == size).expand_as(complete)", "overlong answers count in their groups"),
)

_IN_LOSS = "test_credits_simko.py"

CREDITS = [
    *of_file(
        "ngrpo/methods/credits/token_credits.py",
        _IN_LOSS,
        ("entropies > quantiles", "entropies < quantiles", "simko: where the policy is sure"),
        ("candidates.mean(dim=1) - tokens.log_probs[right]", "candidates.mean(dim=1)", "simko: the token keeps all"),
        ("candidates.mean(dim=1)", "candidates.sum(dim=1)", "simko: α for each of the K"),
        ("advantages > 0.0)", "advantages != 0.0)", "simko: a wrong answer raises the likeliest"),
        ("tokens.likeliest(wrong, 1).squeeze(1) == tokens.tokens[wrong]", "wrong >= 0", "simko: λ for every token"),
        ("torch.quantile(part, q)", "torch.quantile(values, q)", "simko: one quantile for all answers"),
    ),
    *of_file(
        "ngrpo/methods/credits/base.py",
        _IN_LOSS,
        (", sparse_grad=True", "", "a gradient of the logits' size"),
        ("scores[:, :-1] - scores[:, -1:]", "scores[:, :-1]", "candidates without the token's own score"),
    ),
    *of_file(
        "ngrpo/trainers/common/policy_loss.py",
        _IN_LOSS,
        ("term - term.detach()", "term", "the term moves the ratio"),
        ("(length - 1 - action_mask.shape[1])", "(length - action_mask.shape[1])", "the row after the token"),
        ("return places[row], sample", "return row, sample", "packed rows are taken for padded ones"),
    ),
    *of_file(
        "ngrpo/methods/credits/token_credits.py",
        "test_credits.py",
        ("entropies >= threshold", "entropies > threshold", "top_entropy: the smallest of the top is left out"),
        ("math.ceil(", "math.floor(", "top_entropy: rounded down"),
        ("entropies.topk(", "(-entropies).topk(", "top_entropy: the smallest entropies"),
        ("advantages, 0.0)", "advantages, 0.1 * advantages)", "top_entropy: the others keep a part"),
    ),
    *of_file(
        "ngrpo/methods/credits/token_credits.py",
        "test_credits.py",
        (
            "torch.minimum(self.alpha * tokens.entropies, advantages.abs() / self.kappa)",
            "self.alpha * tokens.entropies",
            "entropy_bonus: no bound",
        ),
        ("self.alpha * tokens.entropies,", "tokens.entropies,", "entropy_bonus: α is missing"),
        (
            "advantages.abs() / self.kappa",
            "advantages / self.kappa",
            "entropy_bonus: the bound of a negative advantage",
        ),
        ("/ self.kappa", "/ 2.0", "entropy_bonus: κ is missing"),
    ),
    *of_file(
        "ngrpo/methods/credits/token_credits.py",
        "test_credits.py",
        ("/ torch.bincount(answer)", "", "first_token: the sum and not the mean"),
        ('torch.where(positive, mean, -torch.inf), "amax"', 'mean, "amax"', "first_token: a wrong answer is the best"),
        ("(winner < len(first)) &", "True &", "first_token: groups without a right answer lose theirs"),
        ("silent & positive", "silent", "first_token: wrong answers lose theirs though they should keep it"),
    ),
    *of_file(
        "ngrpo/trainers/openrlhf/step_advantages.py",
        "test_credits.py",
        (
            "torch.cat([h[mask.cpu()] for h, mask in zip(entropies, masks)])",
            "torch.cat([h.flatten() for h in entropies])[: len(advantages)]",
            "padding is counted among the tokens",
        ),
    ),
    *of_file(
        "ngrpo/trainers/openrlhf/model_actors.py",
        "test_credits.py",
        ("output.entropy[:, -log_probs.shape[1] :]", "output.entropy[:, : log_probs.shape[1]]", "of other tokens"),
    ),
]

NOISES = [
    *of_file(
        "ngrpo/methods/policy_noises/weight_noises.py",
        "test_policy_noises.py",
        ("(stage - 1) / last_exponent", "stage / last_exponent", "aqn: the first noisy stage is below σ_s"),
        ("self.end / self.start", "self.start / self.end", "aqn: σ rises"),
        ('(1 if self.form == "paper" else 2)', "1", "aqn: the released exponent"),
        ("(self.steps or steps)", "steps", "aqn: its own number of steps is ignored"),
    ),
    *of_file(
        "ngrpo/methods/policy_noises/weight_noises.py",
        "test_policy_noises.py",
        ("divergence < self.target", "divergence > self.target", "psn: σ away from the target"),
        ("last / self.factor", "last * (2.0 - self.factor)", "psn: not divided"),
        ("min(max(sigma, _LEAST), _MOST)", "sigma", "psn: no bounds"),
        ('("0", "10")', '("0", "2")', "psn: another bound of the weight"),
    ),
    *of_file(
        "ngrpo/methods/policy_noises/base.py",
        "test_policy_noises.py",
        (
            "                parameter.data.copy_(clean[name])\n",
            "                pass\n",
            "the trainer keeps the noise",
        ),
        ("+ scale * noise", "+ noise", "noise without its scale"),
    ),
    *of_file(
        "ngrpo/methods/policy_noises/base.py",
        "test_policy_noises.py",
        ('"policy noise", self.seed, sync, name', '"policy noise", self.seed, name', "the same noise in every sync"),
        (
            '"policy noise", self.seed, sync, name',
            '"policy noise", self.seed, sync',
            "the same noise in every parameter",
        ),
    ),
    *of_file(
        "ngrpo/trainers/openrlhf/trainer.py",
        "test_policy_noises.py",
        ("            self.send_weights(0.0)\n", "", "noisy evaluation"),
        ("if self.noise[0] != self.noise_step:", "if self.noise[1] is None:", "σ is chosen once"),
    ),
    *of_file(
        "ngrpo/trainers/common/mismatch.py",
        "test_policy_noises.py",
        ('"divergence": -log_ratio.mean()', '"divergence": log_ratio.mean()', "the sign of the divergence"),
        ("weight.clamp(bounds.low, bounds.high) if", "weight if", "the mean of weights that are not cut"),
        ("| (weight > bounds.high)", "", "what is above the bounds does not count as cut"),
    ),
]
