# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's ``SamplesGenerator``: the arguments of its requests to the engines.

Under ``--reproducible`` the same seed gives the same rollouts. Stock OpenRLHF 0.11.2 does not: it sends requests to an
engine that is already running, so that the first batches are smaller and round otherwise, and it trains on responses in
the order in which they finish.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from ngrpo.config import batch_checks
from ngrpo.config.run import current_run
from ngrpo.machine.progress import announce
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.machine.upstream.rollout_sizes import prompts_drawn_at_once
from ngrpo.machine.upstream.types import Experience, SamplingParams, Upstream
from ngrpo.rollout.settings import KEY

logger = logging.getLogger("ngrpo.trainers.openrlhf")

_POLL_SECONDS = 0.01
_PATIENCE_SECONDS = 10.0
"""How long engines wait for a whole batch: an agent may do something else first, and others must not wait forever."""


def samples_generator(plain: type) -> type:
    """The subclass of `SamplesGenerator`."""
    return type(plain.__name__, (PerturbedSamplesGenerator, plain), {})


class PerturbedSamplesGenerator(Upstream):
    """What goes in front of `SamplesGenerator`; a run without a feature skips its line.

    Attributes:
        rollout_round: number of the batch of training prompts, from 1; part of a checkpoint.
        temperature_factor: of the sampling schedule, set by the trainer.
        evaluating: whether the current samples are an evaluation's.
    """

    rollout_round = 0
    temperature_factor = 1.0
    evaluating = False
    _in_round = False
    _has_warned_of_scores = False
    _evaluated = 0  # prompts of the current evaluation that have been sent to engines and are finished

    def generate_samples(self, **kwargs: object) -> tuple[list[Experience], float | None, int, bool]:
        samples, filter_pass_rate, prompts, is_exhausted = super().generate_samples(**kwargs)
        return self.of_all_ranks(samples), filter_pass_rate, prompts, is_exhausted

    def of_all_ranks(self, samples: list[Experience]) -> list[Experience]:
        """A step's samples without the last groups of a short one that do not divide over the ranks.

        Ranks with fewer micro-batches than others would let these wait forever. The last step of an episode may have
        any number of prompts.
        """
        rollout = self.args.rollout
        prompts = len(samples) // rollout.n_samples_per_prompt
        if prompts in (0, rollout.batch_size):
            return samples
        fitting = batch_checks.fitting_prompts(Flags(current_run().openrlhf), prompts)
        if fitting < prompts:
            print(
                f"ngrpo: warning: {prompts - fitting} of the {prompts} prompts of a short step are not trained: their"
                " responses do not divide over the ranks.",
                flush=True,
            )
        return samples[: fitting * rollout.n_samples_per_prompt]

    def generate_eval_samples(self, **kwargs: object) -> Any:
        self.evaluating = True
        self._evaluated = 0
        try:
            return super().generate_eval_samples(**kwargs)
        finally:
            self.evaluating = False

    def _generate_vllm(self, *args: object, **kwargs: object) -> Any:
        self._in_round = False
        return super()._generate_vllm(*args, **kwargs)

    def _dispatch_prompts_to_vllm(self, prompts: list[str], *args: object, **kwargs: Any) -> Any:
        run = current_run()
        # Rounds are counted here and not in _generate_vllm, which OpenRLHF calls once more without prompts where the
        # prompts end with a batch. Prompts that replace filtered ones belong to the same round.
        if not (self._in_round or self.evaluating):
            self._in_round = True
            self.rollout_round += 1
        if self.evaluating and prompts:
            # OpenRLHF sends one batch of prompts after the other.
            total = len(self.eval_dataloader.dataset)
            announce(f"evaluating {total} problems", self._evaluated, total)
            self._evaluated += len(prompts)
        arguments = self.request_arguments()
        if self.follows_schedule():
            kwargs["temperature"] = kwargs.get("temperature", 1.0) * self.temperature_factor
        filters = {} if self.evaluating else run.sampling.filters()
        two_rounds = run.second_round is not None and not self.evaluating
        engines = self.vllm_engines
        self.vllm_engines = [_Engine(engine, arguments, filters, two_rounds=two_rounds) for engine in engines]
        try:
            # With dynamic filtering, which requests further prompts one by one, batches are never whole.
            if not run.reproducible or self.args.algo.dynamic_filtering_enable:
                return super()._dispatch_prompts_to_vllm(prompts, *args, **kwargs)
            group_size = kwargs.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
            with _paused_until_complete(engines, expected=len(prompts) * group_size):
                references = super()._dispatch_prompts_to_vllm(prompts, *args, **kwargs)
            return _in_order_of_prompts(references)
        finally:
            self.vllm_engines = engines

    def _process_response_into_experience(self, response: Mapping[str, Any], **kwargs: object) -> Any:
        if self.args.algo.dynamic_filtering_enable and not self.evaluating:
            self._warn_of_score(response.get("scores"))
        return super()._process_response_into_experience(response, **kwargs)

    def _warn_of_score(self, score: float | None) -> None:
        """Warns once of a score on another scale than that of ``--algo.dynamic_filtering_range``.

        Dynamic filtering keeps the groups whose mean score lies within the range, 0 and 1 by default. With scores of -1
        and 1 it would leave out every group of which at most half is right.
        """
        low, high = self.args.algo.dynamic_filtering_range
        is_in_scale = score is None or min(low, 0.0) <= score <= max(high, 1.0)
        if is_in_scale or self._has_warned_of_scores:
            return
        self._has_warned_of_scores = True
        print(
            f"ngrpo: warning: a response has the score {score:g}. Dynamic filtering keeps groups whose mean score is"
            f" between {low:g} and {high:g}, so that it leaves out groups whose scores differ. Give the least and the"
            " greatest score: --algo.dynamic_filtering_range LEAST GREATEST.",
            flush=True,
        )

    def follows_schedule(self) -> bool:
        """Whether a sampling schedule changes the temperature of the current requests."""
        schedule = current_run().sampling_schedule
        return schedule is not None and (schedule.evaluation or not self.evaluating)

    def request_arguments(self) -> dict[str, Any]:
        """Our arguments of the current requests to the engines."""
        run = current_run()
        arguments: dict[str, Any] = {}
        if run.configures_engines:
            arguments["round"] = self.rollout_round
        if self.evaluating and run.perturbation is not None and not run.perturbation.perturb_eval:
            arguments["enabled"] = False
        if self.follows_schedule():
            arguments["training_step"] = self.first_step_of_round()
        elif run.sampling_schedule is not None:
            arguments["scheduled"] = False
        return arguments

    def first_step_of_round(self) -> int:
        """The first step, from 0, that trains on the current round: asynchronous runs may draw several at once."""
        batch = self.args.rollout.batch_size
        drawn_at_once = prompts_drawn_at_once(batch, getattr(self.args.rollout, "vllm_generate_batch_size", None))
        return max(self.rollout_round - 1, 0) * drawn_at_once // batch


class _Engine:
    """A proxy of a rollout actor's handle that adds our arguments and OpenRLHF's missing filters to each request."""

    def __init__(
        self, engine: Any, arguments: Mapping[str, Any], filters: Mapping[str, Any], *, two_rounds: bool
    ) -> None:
        """
        Args:
            engine: the handle.
            arguments: of each request, for the engine's perturbation.
            filters: sampling parameters that OpenRLHF has no flags for (top-k, min-p).
            two_rounds: whether a prompt may get a second round, which `SecondRound.is_needed` decides.
        """
        self._engine = engine
        self._arguments = arguments
        self._filters = filters
        self._two_rounds = two_rounds
        # OpenRLHF calls engine.generate_responses.remote(…), which is :meth:`remote`.
        self.generate_responses = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def remote(self, *, sampling_params: SamplingParams, **kwargs: Any) -> Any:
        """As ``engine.generate_responses.remote``."""
        params = deepcopy(sampling_params)
        for name, value in self._filters.items():
            setattr(params, name, value)
        if self._arguments:
            extra_args = params.extra_args or {}
            arguments = {**(extra_args.get(KEY) or {}), **self._arguments}
            if "training_step" in arguments and kwargs.get("num_samples", 1) > 1:
                arguments["answers"] = kwargs["num_samples"]
            params.extra_args = {**extra_args, KEY: arguments}
        method = self._engine.generate_in_two_rounds if self._two_rounds else self._engine.generate_responses
        return method.remote(sampling_params=params, **kwargs)


def _in_order_of_prompts(references: Sequence[Any]) -> list[Any]:
    """One reference to all responses in the order of their prompts; OpenRLHF reads several as they come."""
    import ray

    responses = [response for group in ray.get(references) for response in group]
    return [ray.put(responses)]


@contextmanager
def _paused_until_complete(engines: Sequence[Any], expected: int) -> Iterator[None]:
    """Engines start on the requests of this context when all have arrived."""
    import ray

    def call_all(method: str) -> list[Any]:
        return ray.get([getattr(engine, method).remote() for engine in engines])

    call_all("pause_generation")
    try:
        yield
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            arrived = sum(call_all("get_num_unfinished_requests"))
            if arrived >= expected:
                break
            if time.monotonic() >= deadline:
                logger.warning(
                    f"reproducible: only {arrived} of {expected} requests of this batch have reached the engines after"
                    f" {_PATIENCE_SECONDS:g} seconds, so a repeated run's rollouts may differ. An agent that does other"
                    " work before it requests tokens has this effect."
                )
                break
            time.sleep(_POLL_SECONDS)
    finally:
        call_all("resume_generation")
