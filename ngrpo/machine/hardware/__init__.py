# SPDX-License-Identifier: Apache-2.0
"""Hardware profiles: what differs between a laptop's CPU and a CUDA cluster, and nothing else.

The trainer is OpenRLHF and the rollout engine is vLLM on both. A profile only says which logical
resources Ray gets, which environment variables every process needs and which OpenRLHF flags have a
sensible value on this machine when the user gave none.
"""

from ngrpo.machine.hardware.profile import HARDWARE, Profile, detect, profile_for, profile_of_run

__all__ = ["HARDWARE", "Profile", "detect", "profile_for", "profile_of_run"]
