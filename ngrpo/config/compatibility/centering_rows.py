# SPDX-License-Identifier: Apache-2.0
"""Pairs that ``--sampling.score_centering`` refuses: a token's probabilities, or its weights, are not those needed."""

from ngrpo.config import features
from ngrpo.config.compatibility.one_update_rows import one_update_rows
from ngrpo.config.compatibility.row import Row
from ngrpo.config.feature_kinds import both, flag, sampling

SCORE_CENTERING = (
    *one_update_rows(
        features.CENTERING,
        why="the trainer computes a token's probabilities from its own logits, so each rollout is used for one update"
        " at the policy that drew it",
    ),
    Row(
        what=features.UNDRAWN,
        conflicts_with=features.CENTERING,
        why="a token that follows from the logits has a centered score of 0, so that nothing would train there",
        fix="sample the text, or leave one of them out",
    ),
    Row(
        what=features.UNKNOWN_DRAWS,
        conflicts_with=features.CENTERING,
        why="the probabilities of its text have no formula",
        fix="leave one of them out: --perturbation.density exact, where there is one, has a score of mean 0",
    ),
    Row(
        what=features.UNRECORDED_DRAWS,
        conflicts_with=features.CENTERING,
        why="a token that ends the thinking, or is protected, is not recorded as the perturbation's draw",
        fix="add --perturbation.until none, and leave --perturbation.protect out",
    ),
    Row(
        what=features.DENSITY,
        conflicts_with=features.CENTERING,
        why="the loss weighs what the perturbation drew and not the token",
        fix="leave one of them out, or add --perturbation.density token",
    ),
    Row(
        what=flag("--algo.advantage.is_correction_level", only="seq"),
        conflicts_with=features.CENTERING,
        why="the weights depend on the whole response, and the mean is over the draws of one token",
        fix="give --algo.advantage.is_correction_level token or off",
    ),
    Row(
        what=both(features.WEIGHTS, features.DIVERGENCE),
        conflicts_with=features.CENTERING,
        why="the weights are no function of the ratio π / π_rollout alone",
        fix="give --algo.advantage.is_correction_gating ratio",
    ),
    Row(
        what=both(features.WEIGHTS, features.BOUNDS_WITHOUT_ONE),
        conflicts_with=features.CENTERING,
        why="the mean score is subtracted with weight 1, which is outside these bounds",
        fix="give --algo.advantage.is_correction_threshold 0 10",
    ),
    Row(
        what=both(features.GSPO, features.WEIGHTS),
        conflicts_with=features.CENTERING,
        why="GSPO's ratio to the rollout's policy is of the whole response, and the mean is over one token's draws",
        fix="give --algo.advantage.is_correction_level off",
    ),
    Row(
        what=sampling("correction_warmup"),
        conflicts_with=features.CENTERING,
        why="the mean score is one of whole weights",
    ),
    Row(
        what=features.CREDIT_IN_LOSS,
        conflicts_with=features.CENTERING,
        why="the credit changes the score, so its mean is another one",
    ),
    Row(
        what=flag("--train.agent_func_path"),
        conflicts_with=features.CENTERING,
        why="an agent may change tokens, and the record of their draws is then dropped",
    ),
)
