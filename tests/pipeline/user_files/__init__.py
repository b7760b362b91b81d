# SPDX-License-Identifier: Apache-2.0
"""What a user would hand to `ngrpo train` by path: agents, a reward function, a replay buffer. Tests do so."""
