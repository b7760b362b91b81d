# SPDX-License-Identifier: Apache-2.0
"""``--eval.at_start``: the evaluation that a run's later ones are compared with. A row of `patches.py`."""

from __future__ import annotations

from typing import Any


def evaluating_first(plain: type) -> type:
    """`PPOTrainer` that evaluates before its first step, logged as step 0. A resumed run has done so already.

    A subclass, as `metrics.reporting_trainer`.
    """

    class EvaluatingFirst(plain):  # type: ignore[misc, valid-type]
        def init_checkpoint_states(self) -> Any:
            states = super().init_checkpoint_states()
            if states["global_step"] == 0 and self.eval_dataloader:
                options = self.args.eval
                sampling = {"temperature": options.temperature, "n_samples_per_prompt": options.n_samples_per_prompt}
                self.evaluate(0, **{**self.generate_kwargs, **sampling})
            return states

    return EvaluatingFirst
