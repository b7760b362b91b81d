# SPDX-License-Identifier: Apache-2.0
"""Bounds, defaults and refusals: lines that only a value at the edge holds."""

_ADVANTAGES = "methods/advantages/test_advantages.py"
_OF_STEP = "methods/advantages/test_advantages_of_step.py"
_FURTHER = "methods/advantages/test_advantages_further.py"
_ROUTING = "perturbations/replay/test_routing.py"
_SIGNIFICANCE = "workbench/test_statistics.py"

MUTATIONS = {
    ("ngrpo/methods/advantages/verified.py", _FURTHER): [
        ("(1.0 - rewards) * penalty", "(rewards < 1.0) * penalty", "lens: a fractional reward pays the whole penalty"),
        (
            "torch.where(has_right, torch.maximum(difficulty, difficulty_by_sampling), difficulty)",
            "torch.maximum(difficulty, difficulty_by_sampling)",
            "lens: D of Eq. 14 without a right response",
        ),
        (
            "torch.where(rewards > 0.0, rewards * (-log_prob).exp(), 0.0)",
            "torch.where(rewards > 0.0, (-log_prob).exp(), 0.0)",
            "lens: a fractional reward counts 1 in D",
        ),
    ],
    ("ngrpo/methods/advantages/verified.py", _ADVANTAGES): [
        ("low=0.0, high=0.49", "low=0.0, high=0.5", "s_grpo: a verifier without information"),
        ('ridge: float = option(0.01, "λ', 'ridge: float = option(0.1, "λ', "rep_exp: another default of ridge"),
        ("p: float = option(0.15", "p: float = option(0.1", "s_grpo: another default of p"),
        ("rho: float = option(0.875", "rho: float = option(0.9", "spo: another default of rho"),
    ],
    ("ngrpo/methods/advantages/base.py", _ADVANTAGES): [
        (
            "group_sizes[group_sizes > 0]",
            "group_sizes[group_sizes > 1]",
            "a response whose group is all overlong gets 0",
        ),
    ],
    ("ngrpo/methods/credits/covariance.py", _ADVANTAGES): [
        ("share: float = option(2e-3", "share: float = option(2e-2", "kl_cov: another default of share"),
        ("low: float = option(1.0", "low: float = option(0.5", "clip_cov: another default of low"),
    ],
    ("ngrpo/methods/credits/token_credits.py", _ADVANTAGES): [
        ("        0.02, ", "        0.05, ", "lp_reg: another default of kappa"),
    ],
    ("ngrpo/methods/credits/token_credits.py", "methods/credits/test_credits_by_hand.py"): [
        (
            "torch.where(probabilities >= threshold",
            "torch.where(probabilities > threshold",
            "lp_reg: Z without the boundary",
        ),
    ],
    ("ngrpo/trainers/openrlhf/step_advantages.py", _FURTHER): [
        (
            "rho * wrong + count - sum(prompt_rewards)",
            "rho * wrong + 1.0 - sum(prompt_rewards) / count",
            "spo: wrong answers are a share",
        ),
    ],
    ("ngrpo/trainers/openrlhf/step_advantages.py", _OF_STEP): [
        ("advantage.at_step(maker.training_step)", "advantage.at_step(0)", "options that change stay at step 0"),
        (
            "uniform = rewards.amax(-1) == rewards.amin(-1)",
            "uniform = (rewards == rewards.mean(-1, keepdim=True)).all(-1)",
            "uniform groups are found by their mean",
        ),
    ],
    ("ngrpo/rollout/runners.py", "methods/sampling_schedules/test_sampling_schedules_run.py"): [
        (
            "scaled / factor.unsqueeze(-1)\n            temperature = temperature * factor",
            "scaled / factor.unsqueeze(-1)",
            "V2: the record has the temperature without the schedule",
        ),
    ],
    ("ngrpo/rollout/request_arguments.py", "rollout/test_request_arguments.py"): [
        (
            "return min(getattr(request, _FIRST_POSITION), request.num_prompt_tokens)",
            "return request.num_prompt_tokens",
            "prefix cache: perturbed blocks of earlier turns are shared",
        ),
    ],
    ("ngrpo/trainers/openrlhf/rollout_actor.py", "rollout/test_startup_check.py"): [
        ("again=run.strict", "again=False", "start-up check: not after a sync"),
    ],
    ("ngrpo/rollout/startup_check.py", "rollout/test_startup_check.py"): [
        (
            "    if not getattr(self, _PASSED, False):",
            "    if False:",
            "start-up check: not of a later perturbation",
        ),
    ],
    ("ngrpo/trainers/openrlhf/moving_average.py", "trainers/openrlhf/test_moving_average.py"): [
        (" and not self.use_dynamic_batch", "", "moving average: dynamic batches are not all updates"),
    ],
    ("ngrpo/trainers/common/weights_file.py", "trainers/openrlhf/test_weight_sync.py"): [
        (".free > 1.1 * size", ".free > 0", "weight sync: /dev/shm runs full"),
    ],
    ("ngrpo/methods/tasks/reasoning_gym.py", "methods/tasks/test_tasks.py::test_a_held_out_question_is_not_trained"): [
        ("if text not in evaluation", "if True", "held-out questions are trained"),
    ],
    ("ngrpo/methods/advantages/verified.py", "methods/advantages/test_advantages_further.py"): [
        (
            "return torch.where(rewards >= 1.0 - ROUNDING",
            "return torch.where(rewards >= 1.0",
            "w_reinforce: no rounding",
        ),
    ],
    ("ngrpo/workbench/evaluate/engine.py", "workbench/evaluate/test_engine.py"): [
        (
            "    with noisy_model(model, policy) as loaded:\n        _load_weights(llm, loaded)\n",
            "    with noisy_model(model, policy) as loaded:\n        pass\n",
            "noise: the engine stays clean",
        ),
        ("_load_weights(llm, loaded)  # the noise", "pass  # the noise", "noise: the engine keeps it"),
        ("llm.llm_engine.reset_prefix_cache()", "pass", "noise: prefixes of other weights"),
        ("        if responses > 1:", "        if False:", "evaluation: no ladder"),
    ],
    ("ngrpo/trainers/openrlhf/second_round.py", "methods/second_rounds/test_second_rounds.py"): [
        ("if extra > method.room:", "if False:", "second round: a prompt beyond its room"),
        ('if "answers" in arguments:', "if False:", "second round: a ladder over the first one"),
        ("not method.is_needed(rewards) or was_cut", "not method.is_needed(rewards)", "second round: a cut prompt"),
        ("if extra > room:", "if extra >= room:", "igrpo: a draft that just fits is not shown"),
    ],
    ("ngrpo/trainers/common/policy_loss.py", "methods/credits/test_credits_loss.py"): [
        (
            "old_log_probs, ones, **kwargs)",
            'old_log_probs, ones, **({**kwargs, "rollout_log_probs": old_log_probs}))',
            "a penalty without the loss's importance weights",
        ),
    ],
    ("perturbations/gates/further.py", "perturbations/gates/test_state.py"): [
        ("step.log_total()) >= self.tau", "step.log_total()) > self.tau", "confidence: closed at τ itself"),
    ],
    ("perturbations/gates/default.py", "perturbations/gates/test_default.py"): [
        ("_MARGIN = 32", "_MARGIN = 0", "until: white space after the text hides it"),
    ],
    ("ngrpo/workbench/statistics.py", _SIGNIFICANCE): [
        ("low = max(low, 0.0)", "low = low", "a share below 0"),
        ("math.sqrt(problems / (problems - 1)) * t.ppf", "t.ppf", "bootstrap: the divisor n of few problems"),
        ("float(np.ptp(values)) <= TIE", "float(np.ptp(values)) == 0.0", "ties need equal bits"),
        ("if problems > seeds and", "if problems >= seeds and", "Wilson: of as many problems as seeds"),
        (
            'difference["within_noise"] = p >= 1 - LEVEL',
            'difference["within_noise"] = p > 1 - LEVEL',
            "a p-value at the level itself is a difference",
        ),
    ],
    ("perturbations/replay/routing.py", _ROUTING): [
        ("if choice.choices != 1:", "if choice.choices < 1:", "routing: a router that chooses twice passes"),
        (
            "                if forward_before is not None:\n                    router.forward = forward_before\n",
            "",
            "routing: an outer scope is lost",
        ),
        (
            "if array.shape[1:] != expected:",
            "if array.shape[1] != expected[0]:",
            "routing: another number of experts passes",
        ),
    ],
    ("ngrpo/rollout/routed_experts.py", "rollout/test_routed_experts.py"): [
        ("<= _MOST_IN_A_BYTE", "< _MOST_IN_A_BYTE", "routing: 256 experts take two bytes"),
    ],
}
