# SPDX-License-Identifier: Apache-2.0
"""Rewards on their way to a gradient, the scorers, and what an engine and an evaluation hand over."""

_CALLS = "methods/scoring/test_reward_calls.py"
_CHECKED = "trainers/openrlhf/test_rewards.py"
_FAULTS = "trainers/openrlhf/test_step_faults.py"
_FURTHER = "methods/advantages/test_advantages_further.py"
_PAIRS = "methods/scoring/test_math_answers.py::test_pairs"

MUTATIONS = {
    ("ngrpo/methods/scoring/reward_calls.py", _CALLS): [
        ("if not math.isfinite(number):", "if False:", "rewards: NaN is a reward"),
        ('if result.get("scores") is not None:', 'if "scores" in result:', "rewards: scores of None are refused"),
        (
            "reward_func([query], [prompt], [own_label])",
            "reward_func(queries=[query], prompts=[prompt], labels=[own_label])",
            "rewards: evaluation needs the names of the parameters",
        ),
        ("own_label = deepcopy(label)", "own_label = label", "rewards: a function changes the next response's label"),
        (
            "name in _OF_OPENRLHF + _OF_NGRPO or",
            "name in _OF_NGRPO or",
            "rewards: extra_logs replace OpenRLHF's reward",
        ),
    ],
    ("ngrpo/methods/scoring/reward_calls.py", _CHECKED): [
        ("(flat,) = flat", "break", "rewards: a nested list of one"),
    ],
    ("ngrpo/methods/scoring/reward_alarms.py", _CALLS): [
        ("return None not in values", "return True", "alarms: options that may have the argument are named"),
        ("names |= {alias.asname: alias.name} if", "names |= {alias.name: alias.name} if", "alarms: a module as"),
    ],
    ("ngrpo/methods/tasks/__init__.py", "workbench/evaluate/test_evaluation.py"): [
        ("prompt + text + end, prompt", "prompt + text, prompt", "rewards: evaluation leaves the end token out"),
    ],
    ("ngrpo/trainers/openrlhf/rewards.py", "methods/advantages/test_advantages.py"): [
        ("experience.rewards = rewards.reshape(count)", "experience.rewards = rewards", "rewards: a column of a model"),
    ],
    ("ngrpo/trainers/openrlhf/rewards.py", _CHECKED): [
        ('if response.get("scores") is not None', "if False", "rewards: an agent's scores are not looked at"),
        ("elif not self._has_reward_model:", "elif False:", "rewards: an agent gives none, and no model does"),
        ("if 400 <= response.status < 500", "if False", "rewards: a refused request is repeated"),
        (" and response.status not in _TEMPORARY", "", "rewards: a server that is busy ends the run"),
    ],
    ("ngrpo/trainers/openrlhf/actor_trainer.py", _FAULTS): [
        (" if update > updates_before]", "]", "zero gradients: the norm of the last rollout counts"),
    ],
    ("ngrpo/trainers/openrlhf/trainer.py", _FAULTS): [
        ('status.get("zero_gradients") == updates', 'status.get("zero_gradients")', "one zero gradient of two is said"),
    ],
    ("ngrpo/methods/advantages/base.py", _FURTHER): [
        ("            self.check_further(further)\n", "            pass\n", "what an advantage reads may be NaN"),
    ],
    ("ngrpo/methods/advantages/verified.py", _FURTHER): [
        ("(further[..., 1] < 1.0)", "(further[..., 1] < 0.0)", "lens: a response without a token"),
        ("least=1e-6", "least=1e-9", "rep_exp: rounding of equal states is normalized"),
    ],
    ("ngrpo/methods/credits/covariance.py", "methods/credits/test_credits.py"): [
        ("prompts * responses * epochs > batch", "prompts * responses * epochs >= batch", "kl_cov: one update passes"),
    ],
    ("ngrpo/config/features.py", "methods/second_rounds/test_second_rounds_training.py"): [
        (
            'lambda advantage: advantage.needs == "values")',
            "lambda advantage: False)",
            "spo: values of a second round's responses",
        ),
    ],
    ("ngrpo/workbench/statistics.py", "workbench/test_statistics.py"): [
        ("if not np.isfinite(table).all():", "if False:", "a difference of NaN is real"),
        ("(values >= 0.0) & (values <= 1.0)", "(values == values)", "holm: p-values beyond 1"),
    ],
    ("ngrpo/workbench/evaluate/evaluation.py", "workbench/evaluate/test_evaluation.py"): [
        ("for k in DEFAULT_KS if k <= n}", "for k in DEFAULT_KS if k < n}", "evaluation: no Pass@n of n samples"),
        ("sum(perturbed) / max(1, tokens)", "sum(perturbed) / len(perturbed)", "evaluation: positions a response"),
        ('problem["correct"] == 0 for', 'problem["correct"] <= 1 for', "evaluation: solved once is never"),
    ],
    ("ngrpo/rollout/records.py", "rollout/test_records.py"): [
        ("if len(lengths) > _LENGTHS_KEPT:", "if False:", "records: lengths without a reader pile up"),
        ("{}).pop(name, None)", "{}).get(name)", "records: a length is kept after it was told"),
        (
            'if "perturbation_fingerprint" not in str(error) or "timed out" in str(error):',
            "if False:",
            "records: any error is a missing plugin",
        ),
    ],
    ("ngrpo/methods/scoring/math_reading.py", _PAIRS): [
        ('.lstrip().removeprefix("+")', "", "math: a leading plus is an operation"),
    ],
    ("ngrpo/methods/scoring/math_response.py", _PAIRS): [
        ('"dozen": 12', '"dozen": 1', "math: a dozen is one"),
        ("if len(numbers) > 1 else 0", "if len(numbers) > 0 else 0", "math: a single guess is no answer"),
        ("        tail = text[open_until:]", "        tail = text[0:]", "math: the last of several guesses counts"),
    ],
}
