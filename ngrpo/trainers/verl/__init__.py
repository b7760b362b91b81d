# SPDX-License-Identifier: Apache-2.0
"""Perturbed rollouts in verl 0.9 through its extension points: :mod:`entry_point`, docs/integrations.md."""
