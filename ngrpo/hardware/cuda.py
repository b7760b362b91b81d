"""The CUDA profile: OpenRLHF and vLLM as they are. Nothing is added, nothing is replaced."""

from ngrpo.hardware.profile import Profile

PROFILE = Profile(name="cuda")
