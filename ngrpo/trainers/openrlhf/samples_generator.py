# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's ``SamplesGenerator``: the arguments of its requests to the engines.

Under ``--reproducible`` the same seed gives the same rollouts. Stock OpenRLHF 0.11.2 sends requests to an engine that
is already running, so that its first batches are smaller and round otherwise, and trains on responses as they finish.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from ngrpo.config.run import current_run
from ngrpo.machine.upstream.types import SamplingParams
from ngrpo.rollout.settings import KEY

logger = logging.getLogger("ngrpo.trainers.openrlhf")

_POLL_SECONDS = 0.01
# An agent may do something else before it generates; the others must not wait for a batch that never fills.
_PATIENCE_SECONDS = 10.0


def samples_generator(plain: type) -> type:
    """A subclass of `SamplesGenerator`; a run without a feature skips its line."""

    class PerturbedSamplesGenerator(plain):  # type: ignore[misc, valid-type]
        """
        Attributes:
            rollout_round: number of the batch of training prompts, from 1; part of a checkpoint.
            temperature_factor: of the sampling schedule, set by the trainer.
            evaluating: whether the current samples are an evaluation's.
        """

        rollout_round = 0
        temperature_factor = 1.0
        evaluating = False
        _in_round = False

        def generate_eval_samples(self, **kwargs: object) -> Any:
            self.evaluating = True
            try:
                return super().generate_eval_samples(**kwargs)
            finally:
                self.evaluating = False

        def _generate_vllm(self, *args: object, **kwargs: object) -> Any:
            self._in_round = False
            return super()._generate_vllm(*args, **kwargs)

        def _dispatch_prompts_to_vllm(self, prompts: list[str], *args: object, **kwargs: Any) -> Any:
            run, schedule = current_run(), current_run().sampling_schedule
            # If the prompts end with a batch, OpenRLHF requests one more of none, which is no round; prompts that
            # replace filtered ones are of the same round.
            if not (self._in_round or self.evaluating):
                self._in_round = True
                self.rollout_round += 1
            arguments: dict[str, Any] = {"round": self.rollout_round} if run.changes_rollouts else {}
            if self.evaluating and run.perturbation is not None and not run.perturbation.perturb_eval:
                arguments["enabled"] = False
            if schedule is not None and (schedule.evaluation or not self.evaluating):
                # The first step, from 0, that trains on this round: asynchronous runs may draw several at once.
                batch = self.args.rollout.batch_size
                drawn = max(getattr(self.args.rollout, "vllm_generate_batch_size", None) or 0, batch)
                arguments["training_step"] = max(self.rollout_round - 1, 0) * drawn // batch
                kwargs["temperature"] = kwargs.get("temperature", 1.0) * self.temperature_factor
            elif schedule is not None:
                arguments["scheduled"] = False
            masks = {} if self.evaluating else run.sampling.masks()
            two_rounds = run.second_round is not None and not self.evaluating
            engines = self.vllm_engines
            self.vllm_engines = [_Engine(engine, arguments, masks, two_rounds) for engine in engines]
            try:
                # With dynamic filtering, which requests further prompts one by one, batches are never whole.
                if not run.reproducible or self.args.algo.dynamic_filtering_enable:
                    return super()._dispatch_prompts_to_vllm(prompts, *args, **kwargs)
                group = kwargs.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
                with _paused_until_complete(engines, len(prompts) * group):
                    responses = super()._dispatch_prompts_to_vllm(prompts, *args, **kwargs)
                # One reference to all responses in the order of their prompts; OpenRLHF reads several as they come.
                import ray

                return [ray.put([response for group in ray.get(responses) for response in group])]
            finally:
                self.vllm_engines = engines

    return PerturbedSamplesGenerator


class _Engine:
    """A proxy of a rollout actor's handle that adds our arguments and OpenRLHF's missing masks to each request.

    With ``two_rounds`` a prompt with wrong responses only gets a second round.
    """

    def __init__(self, engine: Any, arguments: Mapping[str, Any], masks: Mapping[str, Any], two_rounds: bool) -> None:
        self._engine, self._arguments, self._masks, self._two_rounds = engine, arguments, masks, two_rounds
        self.generate_responses = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def remote(self, *, sampling_params: SamplingParams, **kwargs: Any) -> Any:
        """As ``engine.generate_responses.remote``."""
        params = deepcopy(sampling_params)
        for name, value in self._masks.items():
            setattr(params, name, value)
        if self._arguments:
            extra_args = params.extra_args or {}
            arguments = {**(extra_args.get(KEY) or {}), **self._arguments}
            if "training_step" in arguments and kwargs.get("num_samples", 1) > 1:
                arguments["answers"] = kwargs["num_samples"]
            params.extra_args = {**extra_args, KEY: arguments}
        method = self._engine.generate_in_two_rounds if self._two_rounds else self._engine.generate_responses
        return method.remote(sampling_params=params, **kwargs)


@contextmanager
def _paused_until_complete(engines: Sequence[Any], expected: int) -> Iterator[None]:
    """Engines start on the requests of this context when all have arrived."""
    import ray

    def call(method: str) -> list[Any]:
        return ray.get([getattr(engine, method).remote() for engine in engines])

    call("pause_generation")
    try:
        yield
        until = time.monotonic() + _PATIENCE_SECONDS
        while (arrived := sum(call("get_num_unfinished_requests"))) < expected:
            if time.monotonic() >= until:
                logger.warning(
                    f"reproducible: only {arrived} of {expected} requests of this batch have reached the engines after"
                    f" {_PATIENCE_SECONDS:g} seconds, so a repeated run's rollouts may differ. An agent that does other"
                    " work before it requests tokens has this effect."
                )
                break
            time.sleep(_POLL_SECONDS)
    finally:
        call("resume_generation")
