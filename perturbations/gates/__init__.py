# SPDX-License-Identifier: Apache-2.0
"""Where a perturbation acts: the contract, the default gate, and one file for each further gate, named like it."""
