# SPDX-License-Identifier: Apache-2.0
"""Densities, sampling masks, and what is mixed."""

_GRADIENT = "test_policy_gradient.py::test_the_gradient_is_the_true_one"
_LOSS = "ngrpo/trainers/common/log_probs.py"
_STORE = "perturbations/replay/trajectory.py"
_LEFT = "ngrpo/rollout/sampling_support.py"
_MASKED = "test_mask_correction.py"
_STORED = "test_sampling_mask_store.py"
_MIXTURES = "test_strategies_mixtures.py"
_SETS = "test_top_p_sets.py"

MUTATIONS = {
    ("perturbations/density.py", "test_density.py"): [
        ("(2.0 * scale.square()) - constant", "(2.0 * scale.square())", "gaussian: not normalised"),
        ("noise.detach().clamp(low, high)", "noise", "gumbel: the noise is not clamped"),
        ("kept & (log_p > GUMBEL_MASK)", "kept", "gumbel: unlikely candidates are counted in the mean"),
        ("kept & (probabilities > DIRICHLET_MASK)", "kept", "dirichlet: unlikely candidates are counted in the mean"),
        ("terms.clamp(*DIRICHLET_RANGE)", "terms", "dirichlet: terms are not clamped"),
        (") - torch.lgamma(shape)", ")", "dirichlet: not normalised, though its constant depends on the policy"),
        ("kept & (probabilities > NORMAL_MASK)", "kept", "normal: the mask is missing"),
        (".clamp(-NORMAL_REACH, NORMAL_REACH)", "", "normal: draws are not clamped"),
        ("torch.where(kept, logits, -torch.inf)", "logits", "probabilities are shared with ids that top-p cut"),
        ("used.sum(dim=-1).clamp_min(1)", "used.shape[-1]", "the mean is over all candidates"),
        (' + require(normalizer, "edit.normalizer").unsqueeze(-1)', "", "gumbel, dirichlet: the total is missing"),
        ("torch.log(-torch.expm1(-share))", "-noise", "exact: noise above a bound"),
        ("torch.where(below, -share,", "torch.where(below, -noise,", "exact: noise below a bound"),
        ("- seen.sum(dim=-1) * total", "- total", "exact: the weights' density counts its total once"),
        ("seen = kept & (weights >= SMALLEST)", "seen = kept", "exact: a lost weight counts as seen"),
        ("shape * log_weights - torch.lgamma(shape + 1.0)", "0.0 * shape", "exact: a lost weight of Dirichlet's"),
        ("* log_weights - torch.lgamma(shape)", "* log_weights", "exact: Dirichlet's density is not normalised"),
        (".clamp(*_REACH)", "", "censored noise has no bounds"),
    ],
    ("perturbations/methods/soft_grpo.py", "test_density.py"): [
        (
            "distinct = replayed.edit, densities.distinct(replayed.edit.ids)",
            "distinct = replayed.edit, replayed.edit.ids >= 0",
            "gumbel: ids that top-p cut take part",
        ),
        (
            "kept = replayed.edit, densities.distinct(replayed.edit.ids)",
            "kept = replayed.edit, replayed.edit.ids >= 0",
            "dirichlet: ids that top-p cut take part",
        ),
        ("densities.distinct(edit.ids) & (edit.weights != 0.0)", "edit.ids >= 0", "normal: ids that top-p cut count"),
        ("(gumbels >= high) & ~below", "gumbels > 1e9", "gumbel: noise clamped from above counts as drawn"),
        ("below = (gumbels <= low) |", "below =", "gumbel: noise clamped from below counts as drawn"),
        ("probabilities.detach() + densities", "edit.weights + densities", "normal: another mean than its own"),
    ],
    ("perturbations/methods/gaussian.py", "test_density.py"): [
        ("(replayed.temperature / self.tau)", "(1.0 / self.tau)", "gaussian: the temperature is missing in τ"),
        ("ids = replayed.top(self.k)", "ids = edit.ids", "gaussian: the mean is over the recorded tokens"),
    ],
    ("perturbations/methods/gaussian.py", f"{_GRADIENT}[gaussian-soft-density-bandit]"): [
        ('return self.base != "fuzzy"', 'return self.base == "token"', "gaussian: soft loses its drawn token")
    ],
    ("perturbations/replay/scope.py", f"{_GRADIENT}[gaussian-token-density-two-steps]"): [
        ("mixed = mixed.detach()", "mixed = mixed", "the embedding's gradient is counted twice")
    ],
    ("perturbations/replay/scope.py", "test_density_loss.py"): [
        ("torch.where(inside, self._rows - 1, 0)", "torch.where(inside, self._rows, 0)", "the row after the one"),
        ("candidates = candidates.detach()", "candidates = candidates", "constant inputs have a gradient"),
        ("shape[1] - (shape[1] - count)", "shape[1] - (shape[1] - count) - 1", "a score stands at the token before"),
    ],
    ("ngrpo/trainers/common/log_probs.py", "test_density_loss.py"): [
        (
            "if perturbation is None or not perturbation.has_density:",
            "if perturbation is None or not perturbation.has_density or not len(scope._flat.ids):",
            "a rank without a perturbed position skips the density",
        ),
        ("density - density.detach()", "density", "a vector's density has a value, and so a ratio without bounds"),
        ("density - density.detach()", "0.0 * density", "a vector's density has no gradient"),
        (
            " if perturbation.draws_token else torch.zeros_like(tokens)",
            "",
            "a token that was not drawn is in the action",
        ),
        ("action = tokens if perturbation.draws_token else", "action =", "a token that was drawn is not in the action"),
    ],
    ("perturbations/methods/learned.py", "test_tarpo.py"): [
        ("[:, :1] == 0.0)", "[:, :1] != 0.0)", "tarpo: the other decision than was drawn"),
        (" + self.head(mixture[:0]).sum()", "", "tarpo: a rank that asked nothing has no gradient"),
        ("return self.has_density", "return False", "tarpo: the token is not in the action"),
        (
            "(hidden.float(), self.weight.float(), self.bias_shift.float())",
            "(hidden, self.weight.to(hidden), self.bias_shift.to(hidden)).float()",
            "tarpo: the router computes in the hidden state's dtype",
        ),
    ],
    ("perturbations/replay/scope.py", f"{_GRADIENT}[tarpo-density-two-steps]"): [
        ("return given[rows]", "return given[rows].detach()", "the decision does not train the policy")
    ],
    ("perturbations/replay/scope.py", "test_tarpo.py"): [
        ("return given[rows]", "return given[rows + 1]", "the hidden state of the row after the one that decided")
    ],
    ("ngrpo/rollout/step_kernels.py", "test_tarpo.py"): [
        ("None if hidden is None else picked(hidden)", "hidden", "the hidden states of other rows than those gated")
    ],
    ("ngrpo/trainers/openrlhf/model_actors.py", "test_density_actor.py"): [
        ("densities(scope, actor.temperature,", "densities(scope, 1.0,", "the density at temperature 1")
    ],
    ("ngrpo/trainers/common/policy_loss.py", "test_density_actor.py"): [
        (".clamp(-20.0, 20.0)", "", "the mean ratio overflows")
    ],
    (_LOSS, _MASKED): [
        (
            "return log_probs.flatten().index_copy(0, rows, corrected.to(log_probs.dtype)).view_as(log_probs)",
            "return log_probs",
            "sampling mask: the log-probability of the whole distribution",
        ),
        ("for part in (at[inside] - 1,", "for part in (at[inside],", "sampling mask: a row too late"),
        ("highest[members]).exp(", "highest[members]).exp().detach(", "sampling mask: no gradient to the tokens left"),
        ("scores[is_label] - highest -", "scores[is_label] -", "sampling mask: the largest score is not put back"),
    ],
    (_STORE, _STORED): [
        ("np.delete(every, ids) if cut else ids", "ids", "sampling mask: tokens cut for tokens left"),
        ("np.int64) + named)", "np.int64) + 1)", "sampling mask: tokens that are skipped counted one too many"),
    ],
    (_LEFT, _STORED): [
        ("counts > size).mul(0xFF)", "counts > 2 * size).mul(0xFF)", "sampling mask: not the smaller of the two sets"),
        ("bits[:, -1] &= (1 << size % 8) - 1", "bits[:, -1] &= 0xFF", "sampling mask: ids beyond the vocabulary"),
    ],
    ("perturbations/methods/token_draws.py", _MIXTURES): [
        ("step.logits.gather(-1, ids)", "0.0 * ids", "multiplex: the weights do not know the probabilities"),
        ("masked_fill(again, -torch.inf)", "masked_fill(again, 0.0)", "multiplex: what stands in for no token counts"),
        ("self.k * (replayed.token_log_probs", "(replayed.token_log_probs", "multiplex: one normaliser for all draws"),
    ],
    ("perturbations/step.py", _MIXTURES): [
        ("torch.where(gone, -torch.inf, inside)", "inside", "distinct draws: a token twice"),
        ("totals.scatter(1, affected,", "totals.scatter(1, affected[:, :0],", "distinct draws: a block's old sum"),
        ("-torch.inf, token, self.sampled", "-torch.inf, token, 0 * token", "distinct draws: any token where none is"),
        ("self.logits if self.drawable is None else self.drawable", "self.logits", "further draws ignore the mask"),
        ("first = j * (count", "first = 0 * (count", "further draws are all the same"),
        ("totals = blocks.logsumexp(dim=-1", "totals = blocks.amax(dim=-1", "further draws: a block by its likeliest"),
        ("first + count + tokens[:, 0])", "first + places)", "further draws: block and token share their noise"),
        ("streams.exponential(keys, counters).log()", "streams.gumbel(keys, counters)", "further draws: the sign"),
    ],
    ("perturbations/methods/soft.py", _MIXTURES): [
        ("(entropy / math.log(tokens))", "entropy", "moi, selar: the entropy is not normalised"),
        ("tokens=self.k)", "tokens=step.logits.shape[-1])", "moi: the top's entropy over the vocabulary's"),
        ("/ (self.beta + 1.0)", "/ 2.0", "moi: β is missing in the total"),
        ("mixed[:, :1] -= h", "mixed[:, :1] += 0.0 * h", "selar: nothing is taken from the likeliest"),
        ("h >= self.threshold", "h <= self.threshold", "selar: acts where the model is certain"),
        ("(1.0 + h) * p", "p", "selar: nothing is added to the others"),
        (".clamp(0.0, 1.0)", "", "moi: more entropy than there is"),
    ],
    ("perturbations/methods/token_draws.py", "test_cuts.py"): [
        (".exp() >= self.delta", ".exp() >= 0.0", "cuts: no token is too unlikely"),
        ("confident |= ~confident.any(dim=-1, keepdim=True)", "pass", "cuts: no draw where no token is likely"),
        ("values * scale - step.log_total(scale)", "values - step.log_total()", "cuts: δ at the sampling temperature"),
    ],
    ("perturbations/methods/latent.py", _MIXTURES): [
        ("ids[:, 0])", "ids.gather(-1, noisy.argmax(-1, keepdim=True))[:, 0])", "lepo: the text follows the noise"),
        ("(weights * torch.where", "(0.2 * torch.where", "lepo: the weights are missing in the density"),
        ("p.log() + step.gumbel(ids)", "p.log() + step.gumbel(ids).clamp(-1.5, 3.0)", "lepo: the noise is clamped"),
        (".clamp(low, high) - low)", ".clamp(low, high))", "latent: the noise is not one-sided"),
        ("scale = step.temperature", "scale = torch.ones_like(step.temperature)", "latent: p at another temperature"),
        ("nucleus[:, : self.k] = True", "nucleus[:, :1] = True", "latent: fewer than k tokens"),
        ("/ support.sum(dim=-1).clamp_min(1)", "/ self.k", "latent: lost weights are counted in the mean"),
        (
            "scores - replayed.log_probs(edit.ids, temperature=1.0)",
            "(scores - replayed.log_probs(edit.ids, temperature=1.0)).clamp(0.0)",
            "latent: clamped in training",
        ),
        ("replayed.advantages <= 0.0", "replayed.advantages >= 0.0", "latent: turned for good answers"),
        ("terms.detach() + other - other.detach()", "other", "latent: the turned term has another value"),
        ("torch.where(weights < densities.SMALLEST, 0.0, weights)", "weights", "latent: denormal weights are recorded"),
    ],
    ("perturbations/top_tokens.py", _SETS): [
        ("cumsum(dim=-1) < (top_p", "cumsum(dim=-1) <= (top_p", "top-p: a token too many at the bound"),
        ('if top_p_of == "top_k":', 'if top_p_of == "vocabulary":', "top-p: of the vocabulary for that of the top k"),
        ("places <= held", "places < held", "top-p: without the token that reaches it"),
        ('        "top_k",\n', '        "vocabulary",\n', "top-p: the releases' order is not the default"),
    ],
    ("perturbations/methods/soft.py", _SETS): [
        ("if self.filtered and", "if", "selar: filtered where the paper is not"),
        ("torch.where(p > 0.0, ids, ids[:, :1])", "ids", "selar: a record names tokens that were cut"),
    ],
    ("perturbations/gates/default.py", "test_gates.py"): [
        ("self._options.selects(at) & eligible", "self._options.selects(at)", "verdict: whoever asks is perturbed"),
        ("opened = allowed\n", "opened = allowed | True\n", "verdict: what top-k cut stands in the text"),
        ("(greedy < 0) | (greedy == proposal.tokens)", "greedy < 0", "verdict: no greedy position is perturbed"),
        ("opened & self.open(rows, step, first)", "opened", "verdict: thinking never ends"),
        (" & self.feeds(proposal.tokens, self.matched(rows, step.positions))", "", "verdict: protected is fed"),
        ("fed if proposal.acts is None else fed & proposal.acts", "fed", "verdict: fed where nothing acts"),
        (
            "now, state = torch.where(kept, now, before), torch.where(kept, state, self._states[rows, at])",
            "now = torch.where(kept, now, before)",
            "until: a token that is not kept is seen",
        ),
        ("step.positions <= self._ended[rows]", "step.positions < self._ended[rows]", "until: the end is drawn again"),
    ],
    ("perturbations/gates/further.py", _MIXTURES): [
        ("positions.generated < self.length", "positions.positions < self.length", "first: the prompt is counted")
    ],
    ("perturbations/gates/further.py", "test_gates_state.py"): [
        (">= self.tau", "< self.tau", "confidence: open where the policy wavers"),
        ("~closed & (entropy < state", "~closed & (entropy <= state", "swi: a block ends at its own entropy"),
        ('(state["length"] >= self.window)', '(state["length"] > self.window)', "swi: a position too many closed"),
        ('torch.where(goes_on, state["reference"], entropy)', "entropy", "swi: against the last position"),
    ],
    ("perturbations/gates/default.py", "test_gates_state.py"): [
        ("(step.positions - 1) % _POSITIONS].", "step.positions % _POSITIONS].", "state: of 8 positions ago"),
        (".where(kept.unsqueeze(-1), state,", ".where(kept.unsqueeze(-1) | True, state,", "state: of lost draws"),
        ("            self._own_states[row] = self._start", "            pass", "state: of the slot's last request"),
    ],
    ("ngrpo/rollout/perturber.py", "test_gates_state.py"): [
        ('fed.index_copy_(0, of_gated[0], edits["fed"])', "fed[:] = True", "state: told that all is fed")
    ],
    ("perturbations/replay/routing.py", "test_routing.py"): [
        ("(known, self._recorded, own.indices", "(known, own.indices, own.indices", "routing: the model's own experts"),
        ("(scores.gather(1, indices), indices)", "(own.values, indices)", "routing: the weights of other experts"),
        ("func(scores + open_,", "func(scores,", "routing: groups of recorded experts stay closed"),
        ("(len(each),), i)", "(len(each),), 0)", "routing: all experts are the first sample's"),
    ],
    ("ngrpo/rollout/routed_experts.py", "test_routed_experts.py"): [
        ("counts[step.slots]) | step.drawn", "counts[step.slots])", "routing: a token drawn again keeps old experts"),
        ("(step.positions >= self._rows.counts[step.slots]) ", "(step.positions >= 0) ", "routing: a preempted prompt"),
        ("before = [] if name in", "before = self._blocks[slot] if name in", "routing: blocks of before a preemption"),
    ],
    ("ngrpo/trainers/common/sample_records.py", "test_routing.py"): [
        ("np.concatenate([kept, experts[len(kept) :]])", "experts", "routing: a turn replaces earlier experts")
    ],
}
