# SPDX-License-Identifier: Apache-2.0
"""Densities, sampling masks, and what is mixed."""

_GRADIENT = "perturbations/test_policy_gradient.py::test_the_gradient_is_the_true_one"
_LOSS = "ngrpo/trainers/common/log_probs.py"
_STORE = "perturbations/replay/sampling_mask.py"
_LEFT = "ngrpo/rollout/sampling_support.py"
_MASKED = "trainers/common/test_mask_correction.py"
_STORED = "rollout/test_sampling_support.py"
_LATENT = "perturbations/methods/test_latent.py"
_MIXTURES = "perturbations/methods/test_strategies_mixtures.py"
_RECORDS = "perturbations/test_density_of_records.py"
_MULTIPLEX = "perturbations/methods/test_multiplex.py"
_SETS = "perturbations/test_top_tokens.py"

MUTATIONS = {
    ("perturbations/density.py", f"perturbations/test_density.py {_RECORDS}"): [
        ("(2.0 * scale.square())", "scale.square()", "gaussian: σ² in the place of 2 σ²"),
        ("noise.detach().clamp(low, high)", "noise", "gumbel: the noise is not clamped"),
        ("-noise - torch.exp(-noise)", "-noise - torch.exp(noise)", "gumbel: the sign in the exponential"),
        (") - torch.lgamma(shape)", ")", "dirichlet: not normalised, though its constant depends on the policy"),
        ("kept & (probabilities > NORMAL_MASK)", "kept", "normal: the mask is missing"),
        ("used.sum(dim=-1).clamp_min(1)", "used.shape[-1]", "the mean is over all candidates"),
        (' + require(normalizer, "edit.normalizer").unsqueeze(-1)', "", "gumbel, dirichlet: the total is missing"),
    ],
    ("perturbations/methods/soft_grpo.py", _RECORDS): [
        ("edit.normalizer, self.tau)", "edit.normalizer)", "gumbel: τ is missing where y comes back"),
        (
            "densities.distinct(edit.ids) & (edit.weights != 0.0)",
            "edit.ids >= 0",
            "normal: ids that top-p cut take part",
        ),
    ],
    ("perturbations/methods/gaussian.py", _RECORDS): [
        (
            "scale = replayed.temperature / self.tau",
            "scale = 1.0 / self.tau",
            "gaussian: the temperature is missing in τ",
        ),
        ("ids = replayed.top(self.k)", "ids = edit.ids", "gaussian: the mean is over the recorded tokens"),
    ],
    ("perturbations/methods/gaussian.py", f"{_GRADIENT}[gaussian-soft-density-bandit]"): [
        ('return self.base != "fuzzy"', 'return self.base == "token"', "gaussian: soft loses its drawn token"),
    ],
    ("perturbations/replay/scope.py", f"{_GRADIENT}[gaussian-token-density-two-steps]"): [
        ("mixed = mixed.detach()", "mixed = mixed", "the embedding's gradient is counted twice"),
    ],
    ("perturbations/replay/scope.py", "trainers/common/test_log_probs.py"): [
        ("torch.where(inside, self._rows - 1, 0)", "torch.where(inside, self._rows, 0)", "the row after the one"),
    ],
    ("ngrpo/trainers/common/log_probs.py", "trainers/common/test_log_probs.py"): [
        ("density - density.detach()", "density", "a vector's density has a value, and so a ratio without bounds"),
        ("token_log_probs if perturbation.draws_token else", "", "a token that was drawn is not in the action"),
    ],
    ("perturbations/methods/learned.py", "perturbations/methods/test_tarpo.py"): [
        ("[:, :1] == 0.0)", "[:, :1] != 0.0)", "tarpo: the other decision than was drawn"),
        (" + self.head(mixture[:0]).sum()", "", "tarpo: a rank that asked nothing has no gradient"),
    ],
    ("perturbations/replay/scope.py", f"{_GRADIENT}[tarpo-density-two-steps]"): [
        ("return states[rows]", "return states[rows].detach()", "the decision does not train the policy"),
    ],
    ("perturbations/replay/scope.py", "perturbations/methods/test_tarpo.py"): [
        ("return states[rows]", "return states[rows + 1]", "the hidden state of the row after the one that decided"),
    ],
    ("ngrpo/rollout/step_kernels.py", "perturbations/methods/test_tarpo.py"): [
        (
            "logits = Logits(*map(picked, logits))",
            "logits = Logits(*map(picked, logits[:-1]), logits.hidden)",
            "the hidden states of other rows than those gated",
        ),
    ],
    ("ngrpo/trainers/openrlhf/model_actors.py", "trainers/openrlhf/test_model_actors.py"): [
        ("densities(scope, actor.temperature,", "densities(scope, 1.0,", "the density at temperature 1"),
    ],
    ("ngrpo/trainers/common/policy_loss.py", "trainers/openrlhf/test_model_actors.py"): [
        (".clamp(-20.0, 20.0)", "", "the mean ratio overflows"),
    ],
    (_LOSS, _MASKED): [
        ("token_rows[inside] - 1, sets", "token_rows[inside], sets", "sampling mask: a row too late"),
        ("scores[is_drawn] - highest -", "scores[is_drawn] -", "sampling mask: the largest score is not put back"),
    ],
    (_STORE, _STORED): [
        ("np.delete(vocabulary, ids) if cut else ids", "ids", "sampling mask: tokens cut for tokens left"),
        ("np.int64) + names_a_token)", "np.int64) + 1)", "sampling mask: tokens that are skipped counted one too many"),
    ],
    (_LEFT, _STORED): [
        ("bits[:, -1] &= (1 << size % 8) - 1", "bits[:, -1] &= 0xFF", "sampling mask: ids beyond the vocabulary"),
    ],
    ("perturbations/methods/token_draws.py", _MULTIPLEX): [
        (
            "masked_fill(is_repeated, -torch.inf)",
            "masked_fill(is_repeated, 0.0)",
            "multiplex: what stands in for no token counts",
        ),
        ("scores.sum(dim=-1)", "scores[:, 0] * self.k", "multiplex: the density of the first draw alone"),
    ],
    ("perturbations/step.py", _MULTIPLEX): [
        ("torch.where(is_excluded, -torch.inf, logits)", "logits", "distinct draws: a token twice"),
        ("self.logits if self.drawable is None else self.drawable", "self.logits", "further draws ignore the mask"),
        ("streams.exponential(keys, counters).log()", "streams.gumbel(keys, counters)", "further draws: the sign"),
    ],
    ("perturbations/methods/soft.py", _MIXTURES): [
        ("[self.beta + 1.0 - h, h * p]", "[self.beta + 0.0 * h, h * p]", "moi: the pseudo-count of the token"),
        ("/ (self.beta + 1.0)", "/ 2.0", "moi: β is missing in the total"),
        ("h >= self.threshold", "h <= self.threshold", "selar: acts where the model is certain"),
        ("(1.0 + h) * p", "p", "selar: nothing is added to the others"),
    ],
    ("perturbations/methods/token_draws.py", "perturbations/methods/test_cuts.py"): [
        ("probabilities >= self.delta", "probabilities >= 0.0", "cuts: no token is too unlikely"),
        ("step.uniform(ids)", "step.gumbel(ids) + values", "cuts: drawn by probability"),
    ],
    ("perturbations/methods/latent.py", _LATENT): [
        ("noisy_log_p / self.tau", "noisy_log_p", "lepo: τ is missing"),
        (
            "tokens=ids[:, 0])",
            "tokens=ids.gather(-1, noisy_log_p.argmax(-1, keepdim=True))[:, 0])",
            "lepo: the text follows the noise",
        ),
        (".clamp(low, high) - low  #", ".clamp(low, high)  #", "latent: the noise is not shifted"),
        ("replayed.advantages <= 0.0", "replayed.advantages >= 0.0", "latent: turned for good answers"),
    ],
    ("perturbations/top_tokens.py", _SETS): [
        ("cumsum(dim=-1) < limit", "cumsum(dim=-1) <= limit", "top-p: a token too many at the bound"),
        (".long().cumsum(", ".cumsum(", "top-p: the sum of probabilities is rounded"),
        ('        "top_k",\n', '        "vocabulary",\n', "top-p: the releases' order is not the default"),
        ("torch.where(probabilities > 0.0, ids, ids[:, :1])", "ids", "top-p: a record names tokens that were cut"),
    ],
    ("perturbations/gates/default.py", "perturbations/gates/test_default.py"): [
        ("in_text = allowed\n", "in_text = allowed | True\n", "verdict: what top-k cut stands in the text"),
        ("in_text & self.open(rows, step, first)", "in_text", "verdict: thinking never ends"),
    ],
    ("perturbations/gates/further.py", _LATENT): [
        ("positions.generated < self.length", "positions.positions < self.length", "first: the prompt is counted"),
    ],
    ("perturbations/gates/further.py", "perturbations/gates/test_state.py"): [
        (">= self.tau", "< self.tau", "confidence: open where the policy wavers"),
        ("~closed & (entropy < state", "~closed & (entropy <= state", "swi: a block ends at its own entropy"),
    ],
    ("perturbations/gates/default.py", "perturbations/gates/test_state.py"): [
        (
            "torch.where(kept.unsqueeze(-1), state,",
            "torch.where(kept.unsqueeze(-1) | True, state,",
            "state: of lost draws",
        ),
    ],
    ("ngrpo/rollout/step_kernels.py", "perturbations/gates/test_state.py"): [
        ('fed.index_copy_(0, gated_rows, edited.recorded["fed"])', "fed[:] = True", "state: told that all is fed"),
    ],
    ("perturbations/replay/routing.py", "perturbations/replay/test_routing.py"): [
        ("values = scores.gather(1, indices)", "values = own_choice.values", "routing: the weights of other experts"),
        ("np.full(len(array), sample,", "np.full(len(array), 0,", "routing: all experts are the first sample's"),
    ],
    ("ngrpo/rollout/routed_experts.py", "rollout/test_routed_experts.py"): [
        (
            "counts[tokens.slots]) | tokens.drawn",
            "counts[tokens.slots])",
            "routing: a token drawn again keeps old experts",
        ),
        ("before = [] if name in", "before = self._blocks[slot] if name in", "routing: blocks of before a preemption"),
    ],
    ("ngrpo/trainers/common/sample_records.py", "perturbations/replay/test_routing.py"): [
        (
            "np.concatenate([kept, experts[len(kept) :]])",
            "experts",
            "routing: a turn replaces the earlier ones' experts",
        ),
    ],
}
