# SPDX-License-Identifier: Apache-2.0
"""What was fed to the model in a rollout: the records, and the buffers that hold them until the trainer takes them."""

from perturbations.replay.trajectory import ReplayRecord

__all__ = ["ReplayRecord"]
