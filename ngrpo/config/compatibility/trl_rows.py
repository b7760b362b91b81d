# SPDX-License-Identifier: Apache-2.0
"""Arguments of TRL's trainer that a perturbation refuses."""

from ngrpo.config import features, trainer_features
from ngrpo.config.compatibility.row import Row, rows
from ngrpo.config.feature_kinds import when

TRL = (
    Row(
        what=trainer_features.WITHOUT_VLLM,
        conflicts_with=features.IN_ENGINE,
        why="rollouts are perturbed inside vLLM",
        fix="set use_vllm=True",
    ),
    Row(
        what=trainer_features.VLLM_SERVER,
        conflicts_with=features.IN_ENGINE,
        why="its records stay in the server",
        fix="set vllm_mode='colocate'",
    ),
    *rows(
        [
            when("tools", lambda combination: combination.arguments.get("tools")),
            when("environments", lambda combination: combination.arguments.get("environment_factory")),
        ],
        conflicts_with=features.IN_ENGINE,
        why="records cover one turn",
    ),
    Row(
        what=when("rollout_func", lambda combination: combination.arguments.get("rollout_func")),
        conflicts_with=features.IN_ENGINE,
        why="its responses have no records",
    ),
    Row(
        what=trainer_features.TRL_PICTURES,
        conflicts_with=features.IN_ENGINE,
        why="TRL gives vLLM prompts that have a place for each of a picture's tokens, and vLLM adds these places again,"
        " so that records are of other tokens",
        fix="train with OpenRLHF",
    ),
    Row(
        what=trainer_features.TRL_REQUESTS,
        conflicts_with=features.IN_ENGINE,
        why="a seed would make all responses of a group the same, and TRL reads one response and one log-probability of"
        " each request",
        fix="leave it out; GRPOConfig(seed=...) and the perturbation's seed set the draws",
    ),
    Row(
        what=trainer_features.TRL_KERNELS,
        conflicts_with=features.IN_ENGINE,
        why="its kernels take the place of layers, need a GPU, and are untested here",
    ),
    Row(
        what=trainer_features.FILTERED_WEIGHTS,
        conflicts_with=features.IN_ENGINE,
        why="TRL would compare the changed distribution with the model's",
        fix="give PerturbedGRPOTrainer correct_mask=True (for top_p, top_k and min_p), leave them out, or set"
        " vllm_importance_sampling_correction=False and off_policy_mask_threshold=None",
    ),
    Row(
        what=trainer_features.TRL_TENSOR_PARALLEL,
        conflicts_with=features.IN_ENGINE,
        why="each process would get the records of its whole tensor-parallel group",
        fix="set it to 1",
    ),
    Row(
        what=features.PARAMETERS,
        conflicts_with=trainer_features.IN_TRL,
        why="TRL would neither train nor send its parameters",
        fix="use the variant without them, or OpenRLHF",
    ),
    Row(
        what=features.DENSITY,
        conflicts_with=trainer_features.IN_TRL,
        why="TRL's loss takes the token's log-probability",
        fix="set density='token'",
    ),
)
