# SPDX-License-Identifier: Apache-2.0
"""Second rounds."""

from __future__ import annotations

from tests.mutations.mutation import of_file

_TESTS = "test_second_rounds.py"

SECOND_ROUNDS = [
    *of_file(
        "ngrpo/methods/second_rounds/base.py",
        _TESTS,
        ("max(rewards) <= self.wrong", "min(rewards) <= self.wrong", "one wrong answer is enough for a second round"),
        ("right if len(right) < size", "right if len(right) <= size", "no wrong answer stays"),
        ("ratio = log_probs - behavior", "ratio = behavior - log_probs", "ρ upside down"),
        (".log().to(ratio) - ratio)", ".to(ratio) - ratio)", "γ itself in the place of its logarithm"),
        ("return max(lengths)", "return max(lengths[:2])", "nonsense before the template's own system message"),
    ),
    *of_file(
        "ngrpo/methods/second_rounds/lope.py",
        _TESTS,
        ("random.randint(self.least, self.most)", "self.most", "lope: always the longest"),
        ("at = opening(text, tokenizer)", "at = 0", "lope: before the template"),
        ("return self.most + _SEAMS", "return self.least", "lope: no room for the longest"),
    ),
    *of_file(
        "ngrpo/trainers/openrlhf/second_round.py",
        _TESTS,
        ("len(first) + number, log_probs", "number, log_probs", "an answer has the first round's place"),
        (
            "(list(response[name][start:end]) for",
            "(list(response[name]) for",
            "the prompt of the second round is trained",
        ),
        ("max_length + extra, num_samples", "max_length, num_samples", "less room for the second round's answers"),
    ),
    *of_file(
        "ngrpo/trainers/openrlhf/samples_generator.py",
        _TESTS,
        ("second_round is not None and not self.evaluating", "second_round is not None", "one in an evaluation"),
    ),
    *of_file(
        "ngrpo/trainers/openrlhf/step_advantages.py",
        _TESTS,
        ("whole[places] = rewards[row]", "pass", "penalties are lost"),
    ),
    *of_file(
        "ngrpo/trainers/common/policy_loss.py",
        _TESTS,
        ("log_ratio.detach().exp().to(advantages)", "1.0", "shaping has no weight"),
        (
            "torch.where(second, old_log_probs, rollout_log_probs)",
            "rollout_log_probs",
            "the rollout's weight taken twice",
        ),
        ("            log_ratio = log_ratio - log_ratio.detach()\n", "", "ρ is taken twice"),
    ),
]
