# SPDX-License-Identifier: Apache-2.0
"""Rollout perturbations in unmodified OpenRLHF and vLLM: command line, rollout side, trainer side.

Importing this loads nothing else; in particular neither torch nor vLLM nor OpenRLHF.
"""

from perturbations import __version__

__all__ = ["__version__"]
