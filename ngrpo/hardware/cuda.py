"""The CUDA profile: OpenRLHF and vLLM as they are. Nothing is added, nothing is replaced.

`ngrpo.hardware.attention` says what differs where flash-attn is not installed.
"""

from ngrpo.hardware.profile import Profile

PROFILE = Profile(name="cuda")
