# SPDX-License-Identifier: Apache-2.0
"""Perturbed rollouts in verl 0.9, by its own ways in: a trainer, an engine, a rollout server and an agent loop.

    python -m verl.trainer.main_ppo … trainer.v1.trainer_mode=perturbed +perturbation.name=neighbor

:mod:`entry_point` is what verl loads in each of its processes (group ``verl.plugins``); it registers the trainer
(:mod:`perturbed_trainer`), which brings everything else. docs/verl.md says what is and is not covered.
"""
