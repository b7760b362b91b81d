# SPDX-License-Identifier: Apache-2.0
"""Methods around a perturbation: advantages, credits, policy noises, sampling schedules and second rounds."""

TRUNCATED_WEIGHTS = {
    "--algo.advantage.is_correction_level": "token",
    "--algo.advantage.is_correction_mode": "clip",
    "--algo.advantage.is_correction_threshold": ("0", "10"),
}
"""OpenRLHF's flags for a loss that is weighted by min(π / π_rollout, 10)."""
