# SPDX-License-Identifier: Apache-2.0
"""Perturbed rollouts in verl 0.9 through its extension points, which :mod:`entry_point` registers (docs/verl.md)."""
