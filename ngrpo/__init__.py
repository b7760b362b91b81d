# SPDX-License-Identifier: Apache-2.0
"""Rollout perturbations in unmodified OpenRLHF and vLLM: command line, rollout side, trainer side.

Importing this loads nothing else; in particular neither torch nor vLLM nor OpenRLHF.
"""

__version__ = "0.1.0"
