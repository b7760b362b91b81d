# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's three classes of asynchronous training: the trainer, the generator of its rollouts, and what starts both.

Evaluations are the trainer's here, right after a step, as in a synchronous run. In OpenRLHF 0.11.2 the generator
evaluates when a token tells it the trainer's step. The trainer returns the token before it trains the batch, so the
generator never hears of the last steps; and the trainer has trained a further step when it gets an evaluation, so the
weights that it then saves as the best checkpoint are not those that were evaluated.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from ngrpo.config.run import current_run
from ngrpo.machine.upstream.types import Upstream
from ngrpo.trainers.openrlhf.fresh_rollouts import FreshRollouts, WaitingResponses
from ngrpo.trainers.openrlhf.trainer import LENGTH, OurStates, PerturbedTrainer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.utils.data import DataLoader

_ROUND = "ngrpo_round"
"""Our entry for the rollout round in the state of the generator's dataloader."""


class Evaluation(NamedTuple):
    """What the generator hands over to the trainer, which evaluates.

    Attributes:
        dataloader: of the problems.
        generate_kwargs: for OpenRLHF's `SamplesGenerator`, with the evaluation's temperature and number of responses.
    """

    dataloader: DataLoader[Any]
    generate_kwargs: Mapping[str, Any]


def async_trainer(plain: type) -> type:
    """The subclass of `PPOTrainerAsync`, which starts the generator and the trainer."""
    return type(plain.__name__, (AsyncRun, plain), {})


class AsyncRun(Upstream):
    """What goes in front of `PPOTrainerAsync`: the trainer gets from the generator what an evaluation needs."""

    def fit(self) -> None:
        import ray
        from openrlhf.trainer import ppo_trainer_async

        # Not the lock that OpenRLHF itself makes of this class: in a partial rollout it generates without that one.
        lock: Any = ppo_trainer_async.VLLMLock
        engines_lock = lock.remote()
        evaluation = self.generator_actor.hand_over_evaluation.remote(engines_lock)
        ray.get(self.trainer_actor.take_evaluation.remote(evaluation, engines_lock))
        super().fit()


def training_actor(plain: type) -> type:
    """The subclass of `TrainingActor`, which trains on the rollouts of the queue."""
    return type(plain.__name__, (AsyncTrainer, plain), {})


class AsyncTrainer(PerturbedTrainer):
    """What goes in front of `TrainingActor`: a queue without rollouts that are too old, and evaluations.

    Attributes:
        evaluation: None for a run that does not evaluate.
    """

    evaluation: Evaluation | None = None
    _waiting: WaitingResponses | None = None  # of the checkpoint that the run resumes
    _seconds_of_evaluation = 0.0  # after the step before

    def take_evaluation(self, evaluation: Evaluation | None, engines_lock: Any) -> None:
        """Takes what an evaluation needs, and the lock that the generator holds while it generates rollouts."""
        if evaluation is None:
            return
        from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

        self.evaluation = evaluation
        self._engines_lock = engines_lock
        # Its round stays 0, which marks requests that no step trains on.
        self._evaluating_generator = SamplesGenerator(
            strategy=self.strategy,
            prompts_dataloader=None,
            eval_dataloader=evaluation.dataloader,
            tokenizer=self.tokenizer,
            vllm_engines=self.vllm_engines,
        )

    def evaluate_first_weights(self) -> None:
        if self.evaluation is not None:
            self.evaluate_and_log(0, self.evaluation)  # the generator begins afterwards

    def fit(self, *args: object, **kwargs: object) -> None:
        max_staleness = current_run().sampling.max_staleness
        if max_staleness is not None:
            rollout = self.args.rollout
            self.rollout_queue = FreshRollouts(
                self.rollout_queue,
                self.rollout_slots,
                max_staleness=max_staleness,
                batch=rollout.batch_size * rollout.n_samples_per_prompt,
                trainer_version=lambda: self.weight_version,
                step=lambda: self.next_rollout_step,
                waiting=self._waiting,
            )
        super().fit(*args, **kwargs)

    def our_states(self) -> dict[str, object]:
        states = super().our_states()
        if current_run().sampling.max_staleness is not None:
            # By the size of their groups: a run that is resumed with another one cannot compare them with its own.
            states["waiting"] = {self.args.rollout.n_samples_per_prompt: self.rollout_queue.waiting()}
        return states

    def restore(self, ours: OurStates) -> None:
        super().restore(ours)
        self._waiting = ours.get("waiting", {}).get(self.args.rollout.n_samples_per_prompt)

    def save_logs_and_checkpoints(self, step: int, status: Mapping[str, Any], states: dict[str, Any]) -> None:
        # OpenRLHF measures a step from the end of the one before, and that step's evaluation came after it.
        step_seconds = status["timing/step_total"] - self._seconds_of_evaluation
        self._seconds_of_evaluation = 0.0
        super().save_logs_and_checkpoints(step, {**status, "timing/step_total": step_seconds}, states)
        if self.evaluation is not None and step % self.args.eval.steps == 0:
            start = time.monotonic()
            metrics = self.evaluate_and_log(step, self.evaluation)
            self.save_best_checkpoint(metrics, step, states)
            self._seconds_of_evaluation = time.monotonic() - start

    def evaluate_and_log(self, step: int, evaluation: Evaluation) -> dict[str, float]:
        """Evaluates the weights of a step, which the engines have; no other step begins meanwhile."""
        import ray
        from openrlhf.trainer.ppo_trainer import compute_eval_metrics

        ray.get(self._engines_lock.acquire.remote())
        try:
            samples = self._evaluating_generator.generate_eval_samples(**evaluation.generate_kwargs)
        finally:
            ray.get(self._engines_lock.release.remote())
        responses_per_prompt = evaluation.generate_kwargs["n_samples_per_prompt"]
        metrics = compute_eval_metrics(evaluation.dataloader, samples, responses_per_prompt)
        for logger in (self.wandb_logger, self.tensorboard_logger):
            if logger:
                logger.log_eval(step, metrics)
        shown = [f"{name} {value:.3f}" for name, value in metrics.items() if "_pass" in name]
        print(f"ngrpo: evaluation of step {step}: {', '.join(shown)}", flush=True)
        return metrics


def generate_samples_actor(plain: type) -> type:
    """The subclass of `GenerateSamplesActor`, which generates the rollouts."""
    return type(plain.__name__, (AsyncGenerator, plain), {})


class AsyncGenerator(Upstream):
    """What goes in front of `GenerateSamplesActor`: its round, and its dataloader's length, join the loader's state.

    It leaves evaluations to the trainer.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        loader = self.prompts_dataloader
        generator = self.samples_generator
        length = len(loader)
        state_of_loader = loader.state_dict

        def state_dict() -> dict[str, Any]:
            return {**state_of_loader(), _ROUND: generator.rollout_round, LENGTH: length}

        loader.state_dict = state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples_generator.rollout_round = state_dict.get(_ROUND, 0)
        super().load_state_dict({key: state_dict[key] for key in state_dict if key not in (_ROUND, LENGTH)})

    def _should_eval(self, global_step: int) -> bool:
        return False

    def hand_over_evaluation(self, engines_lock: Any) -> Evaluation | None:
        """What the trainer needs for evaluations; None for a run without any.

        From here on this actor holds the lock while it generates rollouts.
        """
        options = self.args.eval
        never = options.steps == math.inf and not current_run().eval_at_start
        if self.eval_dataloader is None or never:
            return None
        import ray

        generate_samples = self.samples_generator.generate_samples

        def generate_alone(**kwargs: object) -> Any:
            ray.get(engines_lock.acquire.remote())
            try:
                return generate_samples(**kwargs)
            finally:
                ray.get(engines_lock.release.remote())

        self.samples_generator.generate_samples = generate_alone
        sampling = {"temperature": options.temperature, "n_samples_per_prompt": options.n_samples_per_prompt}
        return Evaluation(self.eval_dataloader, {**self.generate_kwargs, **sampling})
