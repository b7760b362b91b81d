# SPDX-License-Identifier: Apache-2.0
"""What every request of OpenRLHF says to the engine: its round, its training step, and whether it is perturbed.

Rows of `patches.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from ngrpo.config.run import current_run
from ngrpo.rollout.settings import KEY
from ngrpo.trainers.openrlhf.engine_handles import StandIn, knowing_evaluations, stood_in

if TYPE_CHECKING:
    from vllm import SamplingParams


class _WithArguments(StandIn):
    """Adds arguments to each request."""

    def __init__(self, engine: Any, arguments: Mapping[str, Any]) -> None:
        super().__init__(engine)
        self._arguments = arguments
        self.generate_responses = self

    def remote(self, *, sampling_params: SamplingParams, **kwargs: Any) -> Any:
        """``engine.generate_responses.remote`` with the arguments."""
        params = deepcopy(sampling_params)
        extra_args = params.extra_args or {}
        arguments = {**(extra_args.get(KEY) or {}), **self._arguments}
        if "training_step" in arguments and kwargs.get("num_samples", 1) > 1:
            arguments["answers"] = kwargs["num_samples"]
        params.extra_args = {**extra_args, KEY: arguments}
        return self._engine.generate_responses.remote(sampling_params=params, **kwargs)


def numbered_requests(plain: type) -> type:
    """`SamplesGenerator` whose requests carry the round, and are not perturbed in an evaluation.

    A round is one batch of training prompts, from 1 on; a checkpoint holds its number. Where the prompts end with a
    batch, OpenRLHF asks for one more of none, which is no round. Evaluation rollouts are perturbed where
    ``perturb_eval`` asks for it, and follow a sampling schedule where its ``evaluation`` does.
    """

    class NumberedSamplesGenerator(knowing_evaluations(plain)):  # type: ignore[misc, valid-type]
        rollout_round = 0
        temperature_factor = 1.0  # of the sampling schedule; ngrpo.trainers.openrlhf.sampling_schedule sets it
        _in_round = False

        def _generate_vllm(self, *args: object, **kwargs: object) -> Any:
            self._in_round = False
            return super()._generate_vllm(*args, **kwargs)

        def _dispatch_prompts_to_vllm(self, *args: object, **kwargs: Any) -> Any:
            # Prompts that take the place of filtered ones are of the same round.
            if not (self._in_round or self.evaluating):
                self._in_round = True
                self.rollout_round += 1
            perturbation = current_run().perturbation
            arguments: dict[str, Any] = {"round": self.rollout_round}
            if self.evaluating and perturbation is not None and not perturbation.perturb_eval:
                arguments["enabled"] = False
            schedule = current_run().sampling_schedule
            if schedule is not None and (schedule.evaluation or not self.evaluating):
                arguments["training_step"] = self._training_step()
                kwargs["temperature"] = kwargs.get("temperature", 1.0) * self.temperature_factor
            elif schedule is not None:
                arguments["scheduled"] = False
            with stood_in(self, lambda engine: _WithArguments(engine, arguments)):
                return super()._dispatch_prompts_to_vllm(*args, **kwargs)

        def _training_step(self) -> int:
            """The first step, from 0, that trains on the round at hand: asynchronous runs may draw several at once."""
            rollout = self.args.rollout
            steps = (getattr(rollout, "vllm_generate_batch_size", None) or rollout.batch_size) // rollout.batch_size
            return max(self.rollout_round - 1, 0) * max(steps, 1)

    return NumberedSamplesGenerator
