"""Mutations of formulas: each changes one line of the product, and the tests named beside it must then fail.

Run by hand, from the project's root (a few seconds for each mutation):

    python -m tests.mutations                 # all of them
    python -m tests.mutations normal copo     # those whose file or reason contains one of these words

and by `make test-all`. A mutation that survives shows a formula that no test holds; the exit status is then 1. Nothing
in the working tree is touched: the mutations are made in a temporary copy.

To add one, append a :class:`Mutation` to the list of its part. ``old`` must occur exactly once in the file, which
tests/fast/test_mutations.py checks, so a line that was rewritten takes its mutation along.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_COPIED = ("perturbations", "ngrpo", "tests", "examples", "benchmarks", "docs")
_FAST = "tests/fast/"


@dataclass(frozen=True)
class Mutation:
    """One wrong line.

    Attributes:
        file: path from the project's root.
        old: text that occurs exactly once there.
        new: what takes its place.
        tests: tests in tests/fast, of which at least one must fail, as pytest's arguments without that folder.
        wrong: what is wrong then, in a few words.
    """

    file: str
    old: str
    new: str
    tests: str
    wrong: str


def _of(file: str, tests: str, *lines: tuple[str, str, str]) -> list[Mutation]:
    """Mutations of one file that the same tests catch: old text, new text, what is wrong then."""
    return [Mutation(file, old, new, tests, wrong) for old, new, wrong in lines]


_GRADIENT = "test_policy_gradient.py::test_the_gradient_is_the_true_one"

DENSITIES = [
    *_of(
        "perturbations/density.py",
        "test_density.py",
        ("(2.0 * scale.square())", "scale.square()", "gaussian: σ² in the place of 2 σ²"),
        ("(2.0 * scale.square()) - constant", "(2.0 * scale.square())", "gaussian: not normalised"),
        ("noise.detach().clamp(low, high)", "noise", "gumbel: the noise is not clamped"),
        ("kept & (log_p > GUMBEL_MASK)", "kept", "gumbel: unlikely candidates are counted in the mean"),
        ("probabilities + LOG_FLOOR", "probabilities + 1e-3", "gumbel: another floor inside the logarithm"),
        ("-noise - torch.exp(-noise)", "-noise - torch.exp(noise)", "gumbel: the sign in the exponential"),
        ("kept & (probabilities > DIRICHLET_MASK)", "kept", "dirichlet: unlikely candidates are counted in the mean"),
        ("terms.clamp(*DIRICHLET_RANGE)", "terms", "dirichlet: terms are not clamped"),
        ("(shape - 1.0) * log_draws", "shape * log_draws", "dirichlet: the exponent of the Gamma density"),
        (" - torch.lgamma(shape)", "", "dirichlet: not normalised, though its constant depends on the policy"),
        ("kept & (probabilities > NORMAL_MASK)", "kept", "normal: the mask is missing"),
        (".clamp(-NORMAL_REACH, NORMAL_REACH)", "", "normal: draws are not clamped"),
        ("-0.5 * distance.square()", "-distance.square()", "normal: σ² in the place of 2 σ²"),
        ("torch.where(kept, logits, -torch.inf)", "logits", "probabilities are shared with ids that top-p cut"),
        ("used.sum(dim=-1).clamp_min(1)", "used.shape[-1]", "the mean is over all candidates"),
    ),
    *_of(
        "perturbations/density.py",
        f"{_GRADIENT}[gumbel-density-bandit]",
        ("ROUNDING = 1e-4", "ROUNDING = 0.0", "gumbel: rounding decides whether clamped noise has a gradient"),
    ),
    *_of(
        "perturbations/strategies/gumbel.py",
        "test_density.py",
        ("densities.distinct(replayed.edit.ids)", "replayed.edit.ids >= 0", "gumbel: ids that top-p cut take part"),
        ("self.tau * weights.log()", "weights.log()", "gumbel: τ is missing where y comes back"),
        ("weights.log() + edit.normalizer.unsqueeze(-1)", "weights.log()", "gumbel: the total is missing"),
    ),
    *_of(
        "perturbations/strategies/dirichlet.py",
        "test_density.py",
        ("densities.distinct(replayed.edit.ids)", "replayed.edit.ids >= 0", "dirichlet: ids that top-p cut take part"),
        (".log() + edit.normalizer.unsqueeze(-1)", ".log()", "dirichlet: the total is missing"),
    ),
    *_of(
        "perturbations/strategies/normal.py",
        "test_density.py",
        (
            "densities.distinct(edit.ids) & (edit.weights != 0.0)",
            "edit.ids >= 0",
            "normal: ids that top-p cut take part",
        ),
        ("edit.weights * edit.normalizer.unsqueeze(-1)", "edit.weights", "normal: the total is missing"),
    ),
    *_of(
        "perturbations/strategies/gaussian.py",
        "test_density.py",
        ("(replayed.temperature / self.tau)", "(1.0 / self.tau)", "gaussian: the temperature is missing in τ"),
        ("ids = replayed.top(self.k)", "ids = edit.ids", "gaussian: the mean is over the recorded tokens"),
    ),
    *_of(
        "perturbations/strategies/gaussian.py",
        f"{_GRADIENT}[gaussian-soft-density-bandit]",
        ('return self.base != "fuzzy"', 'return self.base == "token"', "gaussian: soft loses its drawn token"),
    ),
    *_of(
        "perturbations/replay/scope.py",
        f"{_GRADIENT}[gaussian-token-density-two-steps]",
        ("mixed = mixed.detach()", "mixed = mixed", "the embedding's gradient is counted twice"),
    ),
    *_of(
        "perturbations/replay/scope.py",
        "test_density_loss.py",
        ("torch.where(inside, self._rows - 1, 0)", "torch.where(inside, self._rows, 0)", "the row after the one"),
    ),
    *_of(
        "ngrpo/trainer/density_loss.py",
        "test_density_loss.py",
        (
            "if perturbation is None or not perturbation.has_density:",
            "if perturbation is None or not perturbation.has_density or not len(scope._flat.ids):",
            "a rank without a perturbed position skips the density",
        ),
        ("density - density.detach()", "density", "a vector's density has a value, and so a ratio without bounds"),
        ("density - density.detach()", "0.0 * density", "a vector's density has no gradient"),
        (
            "own = tokens if self._perturbation.draws_token else torch.zeros_like(tokens)",
            "own = tokens",
            "a token that was not drawn is in the action",
        ),
        (
            "own = tokens if self._perturbation.draws_token else torch.zeros_like(tokens)",
            "own = torch.zeros_like(tokens)",
            "a token that was drawn is not in the action",
        ),
    ),
    *_of(
        "ngrpo/trainer/model_actors.py",
        "test_density_actor.py",
        ("densities(scope, model.temperature)", "densities(scope, 1.0)", "the actor's density at temperature 1"),
        ("densities(scope, self.actor.temperature,", "densities(scope, 1.0,", "the step's density at temperature 1"),
        (".clamp(-20.0, 20.0)", "", "the mean ratio overflows"),
    ),
]

ADVANTAGES = [
    Mutation(
        "ngrpo/advantages/base.py",
        "    apart = rewards - rewards[:, :1]",
        "    apart = rewards",
        "test_advantages.py",
        "group_norm: the float32 mean of equal rewards is not their value",
    ),
    Mutation(
        "ngrpo/advantages/base.py",
        "correction=min(1, rewards.shape[1] - 1)",
        "correction=0",
        "test_advantages.py",
        "group_norm: the deviation of a population",
    ),
    Mutation(
        "ngrpo/advantages/base.py",
        "(apart - apart.mean(-1, keepdim=True))",
        "apart",
        "test_advantages.py",
        "group_norm: the mean is not taken off",
    ),
    Mutation(
        "ngrpo/advantages/base.py",
        " / (deviation + 1e-9)",
        "",
        "test_advantages.py",
        "group_norm: not divided by the deviation",
    ),
    Mutation(
        "ngrpo/advantages/base.py",
        "(~rewards.isfinite()).nonzero()",
        "rewards.isnan().nonzero()",
        "test_advantages.py",
        "an infinite reward is let through",
    ),
    Mutation(
        "ngrpo/advantages/ngrpo.py",
        "size = rewards.shape[1] + self.n",
        "size = rewards.shape[1]",
        "test_advantages.py",
        "ngrpo: virtual answers are missing in the mean",
    ),
    Mutation(
        "ngrpo/advantages/ngrpo.py",
        " + self.n * mean.square()",
        "",
        "test_advantages.py",
        "ngrpo: virtual answers are missing in the deviation",
    ),
    Mutation(
        "ngrpo/advantages/ngrpo.py",
        "(squares / (size - 1))",
        "(squares / size)",
        "test_advantages.py",
        "ngrpo: the deviation of a population",
    ),
    Mutation(
        "ngrpo/advantages/ngrpo.py",
        ".sqrt() + 1e-6)",
        ".sqrt() + 1e-9)",
        "test_advantages.py",
        "ngrpo: another epsilon",
    ),
    Mutation(
        "ngrpo/advantages/ngrpo.py",
        "(rewards - self.max_reward).clamp(max=0.0)",
        "(rewards - 1.0).clamp(max=0.0)",
        "test_advantages.py",
        "ngrpo: max_reward is ignored",
    ),
    Mutation(
        "ngrpo/advantages/ngrpo.py",
        '("0.16", "0.24")',
        '("0.24", "0.16")',
        "test_advantages.py",
        "ngrpo: the clip range the wrong way round",
    ),
    Mutation(
        "ngrpo/advantages/psr.py",
        "return rewards.clone()",
        "return rewards - 1.0",
        "test_advantages.py",
        "psr: wrong answers count",
    ),
    Mutation(
        "ngrpo/advantages/nsr.py",
        "return rewards - 1.0",
        "return rewards.clone()",
        "test_advantages.py",
        "nsr: correct answers count",
    ),
    Mutation(
        "ngrpo/advantages/w_reinforce.py",
        "self.lam * rewards, rewards - 1.0",
        "rewards, rewards - 1.0",
        "test_advantages.py",
        "w_reinforce: λ is ignored",
    ),
    Mutation(
        "ngrpo/advantages/w_reinforce.py",
        "self.lam * rewards, rewards - 1.0",
        "self.lam * rewards, rewards",
        "test_advantages.py",
        "w_reinforce: wrong answers do not count",
    ),
    Mutation(
        "ngrpo/advantages/w_reinforce.py",
        "rewards >= 1.0 - ROUNDING",
        "rewards > 0.0",
        "test_advantages.py",
        "w_reinforce: a partly correct answer counts as correct",
    ),
    Mutation(
        "ngrpo/advantages/copo.py",
        "rewards + self.beta / (1.0 + counts.to(rewards.dtype)).sqrt()",
        "rewards + 1.0 / (1.0 + counts.to(rewards.dtype)).sqrt()",
        "test_advantages.py",
        "copo: β is ignored",
    ),
    Mutation(
        "ngrpo/advantages/copo.py",
        "(1.0 + counts.to",
        "(2.0 + counts.to",
        "test_advantages.py",
        "copo: 2 + N in place of 1 + N",
    ),
    Mutation(
        "ngrpo/advantages/copo.py",
        "(rewards.dtype)).sqrt()",
        "(rewards.dtype))",
        "test_advantages.py",
        "copo: no square root",
    ),
    Mutation(
        "ngrpo/advantages/copo.py",
        "rewards + self.beta",
        "rewards - self.beta",
        "test_advantages.py",
        "copo: the bonus punishes",
    ),
    Mutation(
        "ngrpo/trainer/visits.py",
        "return [self._seen[key] - 1 for key in keys]",
        "return [self._seen[key] for key in keys]",
        "test_advantages.py",
        "copo: an answer counts itself",
    ),
    Mutation(
        "ngrpo/trainer/metrics.py",
        "agreed += int(record.agreed[counted].sum())",
        "agreed += int(record.agreed.sum())",
        "test_measures.py",
        "anchor_agreement counts positions that its denominator leaves out",
    ),
]

_BEST = "test_advantages_best_of_k.py"

BEST_OF_K = [
    *_of(
        "ngrpo/advantages/pass_at_k.py",
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
    *_of(
        "ngrpo/advantages/pkpo.py",
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
    *_of(
        "ngrpo/advantages/base.py",
        _BEST,
        ("share * (self.k_end - self.k)", "share * (self.k - self.k_end)", "annealing goes the wrong way"),
        ("float(step >= self.k_steps)", "float(step > self.k_steps)", "annealing switches a step late"),
        ("step / self.k_steps", "step / (2 * self.k_steps)", "linear annealing at half the pace"),
    ),
]

CREDITS = [
    *_of(
        "ngrpo/credits/top_entropy.py",
        "test_credits.py",
        ("entropies >= threshold", "entropies > threshold", "top_entropy: the smallest of the top is left out"),
        ("math.ceil(", "math.floor(", "top_entropy: rounded down"),
        ("entropies.topk(", "(-entropies).topk(", "top_entropy: the smallest entropies"),
        ("advantages, 0.0)", "advantages, 0.1 * advantages)", "top_entropy: the others keep a part"),
    ),
    *_of(
        "ngrpo/credits/entropy_bonus.py",
        "test_credits.py",
        (
            "torch.minimum(self.alpha * entropies, advantages.abs() / self.kappa)",
            "self.alpha * entropies",
            "entropy_bonus: no bound",
        ),
        ("self.alpha * entropies,", "entropies,", "entropy_bonus: α is missing"),
        (
            "advantages.abs() / self.kappa",
            "advantages / self.kappa",
            "entropy_bonus: the bound of a negative advantage",
        ),
        ("/ self.kappa", "/ 2.0", "entropy_bonus: κ is missing"),
    ),
    *_of(
        "ngrpo/trainer/credit_seams.py",
        "test_credits.py",
        (
            "torch.cat([h[mask.cpu()] for h, mask in zip(entropies, masks)])",
            "torch.cat([h.flatten() for h in entropies])[: len(before)]",
            "padding is counted among the tokens",
        ),
        ("output.entropy[:, -log_probs.shape[1] :]", "output.entropy[:, : log_probs.shape[1]]", "of other tokens"),
    ),
]

NOISES = [
    *_of(
        "ngrpo/policy_noises/aqn.py",
        "test_policy_noises.py",
        ("(stage - 1) / last_exponent", "stage / last_exponent", "aqn: the first noisy stage is below σ_s"),
        ("self.end / self.start", "self.start / self.end", "aqn: σ rises"),
        ('(1 if self.form == "paper" else 2)', "1", "aqn: the released exponent"),
        ("(self.steps or steps)", "steps", "aqn: its own number of steps is ignored"),
    ),
    *_of(
        "ngrpo/policy_noises/psn.py",
        "test_policy_noises.py",
        ("divergence < self.target", "divergence > self.target", "psn: σ away from the target"),
        ("last / self.factor", "last * (2.0 - self.factor)", "psn: not divided"),
        ("min(max(changed, _LEAST), _MOST)", "changed", "psn: no bounds"),
        ('("0", "10")', '("0", "2")', "psn: another bound of the weight"),
    ),
    *_of(
        "ngrpo/policy_noises/base.py",
        "test_policy_noises.py",
        (
            "                parameter.data.copy_(clean[name])\n",
            "                pass\n",
            "the trainer keeps the noise",
        ),
        ("+ scale * self._drawn", "+ self._drawn", "noise without its scale"),
        ("self.seed, sync, name", "self.seed, name", "the same noise in every sync"),
        ("self.seed, sync, name", "self.seed, sync", "the same noise in every parameter"),
    ),
    *_of(
        "ngrpo/trainer/policy_noise.py",
        "test_policy_noises.py",
        ("            self._send(0.0)\n", "", "noisy evaluation"),
        ("if self.chosen[0] != self.noise_step:", "if self.chosen[1] is None:", "σ is chosen once"),
    ),
    *_of(
        "ngrpo/trainer/importance.py",
        "test_policy_noises.py",
        ('"divergence": -ratio.mean()', '"divergence": ratio.mean()', "the sign of the divergence"),
        ("weight.clamp(low, high) if", "weight if", "the mean of weights that are not cut"),
        ("| (weight > high)", "", "what is above the bounds does not count as cut"),
    ),
]

_LOSS, _STORE = "ngrpo/trainer/mask_correction.py", "ngrpo/rollout/sampling_mask.py"
_MASKED, _STORED = "test_mask_correction.py", "test_sampling_mask.py"

SAMPLING = [
    Mutation(
        _LOSS,
        "return log_probs.flatten().index_copy(0, rows, corrected.to(log_probs.dtype)).view_as(log_probs)",
        "return log_probs",
        _MASKED,
        "sampling mask: the log-probability of the whole distribution",
    ),
    Mutation(
        _LOSS,
        "for part in (at[inside] - 1,",
        "for part in (at[inside],",
        _MASKED,
        "sampling mask: a row too late",
    ),
    Mutation(
        _LOSS,
        "index_add(0, which, (scores - highest[which]).exp())",
        "index_add(0, which, (scores - highest[which]).exp().detach())",
        _MASKED,
        "sampling mask: no gradient to the tokens left",
    ),
    Mutation(
        _LOSS,
        "return scores[drawn] - highest - total.log()",
        "return scores[drawn] - total.log()",
        _MASKED,
        "sampling mask: the largest score is not put back",
    ),
    Mutation(
        _STORE, "np.delete(every, ids) if cut else ids", "ids", _STORED, "sampling mask: tokens cut for tokens left"
    ),
    Mutation(
        _STORE,
        "cut = 2 * counts > self._size",
        "cut = 2 * counts > 2 * self._size",
        _STORED,
        "sampling mask: not the smaller of the two sets",
    ),
    Mutation(
        _STORE, "inside = ids < self._size", "inside = ids >= 0", _STORED, "sampling mask: ids beyond the vocabulary"
    ),
]

_MIXTURES = "test_strategies_mixtures.py"

MIXTURES = [
    *_of(
        "perturbations/strategies/multiplex.py",
        _MIXTURES,
        (
            "torch.softmax(step.logits.gather(-1, ids), dim=-1)",
            "torch.full_like(ids, 1 / 3.0, dtype=torch.float32)",
            "multiplex: the weights do not know the probabilities",
        ),
        ("1.0 / self.k", "1.0 / 3.5", "multiplex: the average is over more draws than there are"),
        ("self.k * (replayed.token_log_probs", "(replayed.token_log_probs", "multiplex: one normaliser for all draws"),
        ("scores.sum(dim=-1)", "scores[:, 0] * self.k", "multiplex: the density of the first draw alone"),
    ),
    *_of(
        "perturbations/step.py",
        _MIXTURES,
        ("self.logits if self.drawable is None else self.drawable", "self.logits", "further draws ignore the mask"),
        ("first = j * (count", "first = 0 * (count", "further draws are all the same"),
        (
            "totals = blocks.logsumexp(dim=-1)",
            "totals = blocks.amax(dim=-1)",
            "further draws: a block by its likeliest",
        ),
        ("first + count + tokens", "first + places", "further draws: block and token share their noise"),
        ("streams.exponential(keys, counters).log()", "streams.gumbel(keys, counters)", "further draws: the sign"),
    ),
    *_of(
        "perturbations/strategies/moi.py",
        _MIXTURES,
        ("[self.beta + 1.0 - h, h * p]", "[self.beta + 0.0 * h, h * p]", "moi: the pseudo-count of the token"),
        ("/ math.log(everything.shape[-1])", "", "moi: the entropy is not normalised"),
        ("/ math.log(self.k)", "/ math.log(step.logits.shape[-1])", "moi: the top's entropy over the vocabulary's"),
        ("/ (self.beta + 1.0)", "/ 2.0", "moi: β is missing in the total"),
    ),
    *_of(
        "perturbations/strategies/selar.py",
        _MIXTURES,
        ("mixed[:, :1] -= h", "mixed[:, :1] += 0.0 * h", "selar: nothing is taken from the likeliest"),
        ("h >= self.threshold", "h <= self.threshold", "selar: acts where the model is certain"),
        ("/ math.log(self.k)", "", "selar: the entropy is not normalised"),
        ("(1.0 + h) * p", "p", "selar: nothing is added to the others"),
    ),
    *_of(
        "perturbations/strategies/lepo.py",
        _MIXTURES,
        ("scores / self.tau", "scores", "lepo: τ is missing"),
        (
            "dim=-1)), ids[:, 0])",
            "dim=-1)), ids.gather(-1, scores.argmax(-1, keepdim=True))[:, 0])",
            "lepo: the text follows the noise",
        ),
        ("(weights * log_probs).sum(dim=-1)", "log_probs.mean(dim=-1)", "lepo: the weights are missing in the density"),
        ("step.gumbel(ids)", "step.gumbel(ids).clamp(-1.5, 3.0)", "lepo: the noise is clamped"),
    ),
    *_of(
        "perturbations/strategies/latent.py",
        _MIXTURES,
        (".clamp(low, high) - low)", ".clamp(low, high))", "latent: the noise is not one-sided"),
        (
            "step.logits * step.temperature.unsqueeze(-1)",
            "step.logits.clone()",
            "latent: p at another temperature",
        ),
        ("kept[:, : self.k] = True", "kept[:, :1] = True", "latent: fewer than k tokens"),
        ("replayed.log_probs(edit.ids, temperature=1.0)", "replayed.log_probs(edit.ids)", "latent: p(θ) likewise"),
        ("-delta - torch.exp(-delta)", "-delta - torch.exp(delta)", "latent: the sign in the exponential"),
        (
            "scores - replayed.log_probs(edit.ids, temperature=1.0)",
            "(scores - replayed.log_probs(edit.ids, temperature=1.0)).clamp(0.0, 4.5)",
            "latent: clamped in training",
        ),
        ("replayed.advantages <= 0.0", "replayed.advantages >= 0.0", "latent: turned for good answers"),
        ("other = delta - torch.exp(delta)", "other = delta - torch.exp(-delta)", "latent: the turned gradient"),
        ("terms.detach() + other - other.detach()", "other", "latent: the turned term has another value"),
    ),
    *_of(
        "perturbations/gates/first.py",
        _MIXTURES,
        ("positions.generated < self.length", "positions.positions < self.length", "first: the prompt is counted"),
    ),
]

MUTATIONS = [*DENSITIES, *ADVANTAGES, *BEST_OF_K, *CREDITS, *NOISES, *SAMPLING, *MIXTURES]


def problem(mutation: Mutation, root: Path = ROOT) -> str | None:
    """Why a mutation cannot be made, or None."""
    file = root / mutation.file
    if not file.is_file():
        return f"there is no file {mutation.file}"
    count = file.read_text(encoding="utf-8").count(mutation.old)
    return None if count == 1 else f"its old text occurs {count} times in {mutation.file}, not once"


def _pytest(root: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *(_FAST + test for test in tests)]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def survives(mutation: Mutation, root: Path) -> bool:
    """Whether the mutation's tests pass in the copy at ``root`` although its line is wrong.

    Raises:
        RuntimeError: where the mutation cannot be made, or pytest does neither pass nor fail.
    """
    reason = problem(mutation, root)
    if reason is not None:
        raise RuntimeError(f"mutation {mutation.wrong!r}: {reason}")
    file = root / mutation.file
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        result = _pytest(root, mutation.tests.split())
    finally:
        file.write_text(text, encoding="utf-8")
    if result.returncode not in (0, 1):
        raise RuntimeError(f"mutation {mutation.wrong!r}: pytest could not run\n{result.stdout[-2000:]}")
    return result.returncode == 0


def main(words: list[str]) -> int:
    """Makes each mutation in a copy and reports those that survive; the exit status."""
    chosen = [m for m in MUTATIONS if not words or any(word in m.file or word in m.wrong for word in words)]
    if not chosen:
        print(f"no mutation's file or reason contains {' or '.join(words)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in _COPIED:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "setup.py", "README.md", "Makefile"):
            shutil.copy(ROOT / name, root / name)
        print("the tests without a mutation", flush=True)
        clean = _pytest(root, sorted({test for m in chosen for test in m.tests.split()}))
        if clean.returncode:
            print(f"they fail already, so they show nothing:\n{clean.stdout[-4000:]}", file=sys.stderr)
            return 2
        alive = []
        for mutation in chosen:
            start = time.monotonic()
            survived = survives(mutation, root)
            alive += [mutation] * survived
            outcome = "SURVIVES" if survived else "caught"
            print(f"{outcome:8} {time.monotonic() - start:5.1f} s  {mutation.file}: {mutation.wrong}", flush=True)
    print(f"{len(alive)} of {len(chosen)} mutations survive")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
