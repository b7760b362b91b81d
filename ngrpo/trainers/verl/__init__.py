# SPDX-License-Identifier: Apache-2.0
"""Perturbed rollouts in verl 0.9 through its extension points: a trainer, an engine, a rollout server, an agent loop.

verl loads :mod:`entry_point` in each of its processes; it registers the trainer, which brings the rest (docs/verl.md).
"""
