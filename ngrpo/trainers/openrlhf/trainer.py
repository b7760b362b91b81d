# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's ``PPOTrainer``, the loop over steps, and its two halves where training is asynchronous."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import lru_cache
from math import ceil
from types import MethodType
from typing import Any

from ngrpo.config.run import PROGRESS, current_run
from ngrpo.machine.models import conversation
from ngrpo.machine.upstream.patch import around
from ngrpo.machine.upstream.types import DeepspeedStrategy, Experience, PreTrainedTokenizerBase
from ngrpo.methods.sampling_schedules.base import PastStep, Run, SamplingSchedule
from ngrpo.trainers.openrlhf.actor_trainer import MEAN_METRICS
from perturbations.errors import UsageError, require

NO_UPDATE = (
    "ngrpo: warning: step {step} made no optimizer step: {responses} responses do not fill --train.batch_size, as where"
    " prompts were filtered out or the last batch is a short one. The weights are those of the step before."
)
NO_GRADIENT = (
    "ngrpo: warning: step {step} trained nothing: the gradient was exactly 0 in each of its updates ({updates:g}). All"
    " advantages were 0, as where all responses to each prompt have the same reward, or the loss left out every token."
)
_STATE, _ROUND, _LENGTH = "ngrpo", "ngrpo_round", "ngrpo_length"


def trainer(plain: Any) -> type:
    """A subclass of `PPOTrainer` and of `TrainingActor`; a run without a feature skips its line.

    Not of `BasePPOTrainer`: ``@ray.remote`` copies inherited methods into the class it decorates.
    """

    class PerturbedTrainer(plain):
        """
        Attributes:
            noise_step: the training step of the next rollouts.
            noise: the step that the engines' noise was last chosen for, and its σ.
            past_steps: for the sampling schedule.
        """

        noise_step = 0
        noise: tuple[int, float | None] = (-1, None)
        past_steps: tuple[PastStep, ...] = ()

        def init_checkpoint_states(self) -> dict[str, Any]:
            run, states = current_run(), super().init_checkpoint_states()
            self.noise_step = states["global_step"]
            if _STATE in states:
                ours = states[_STATE]
                if hasattr(self, "samples_generator"):  # in an asynchronous run the generator has the round
                    self.samples_generator.rollout_round = ours["rollout_round"]
                self.experience_maker.visits, self.noise = ours["visits"], tuple(ours["noise"])
                self.past_steps = tuple(PastStep(*step) for step in ours["past_steps"])
            if run.policy_noise is not None and not self.noise_step:
                self.broadcast_to_vllm()  # the first rollout's weights have noise as well; a resumed run sends its own
            if run.eval_at_start and not self.noise_step and self.eval_dataloader:
                options = self.args.eval
                sampling = {"temperature": options.temperature, "n_samples_per_prompt": options.n_samples_per_prompt}
                self.evaluate(0, **{**self.generate_kwargs, **sampling})
            self.choose_temperature()
            return states

        def train_step(self, rollout_samples: list[Experience], global_step: int) -> tuple[dict[str, Any], int]:
            run, rolled_out, schedule = current_run(), self.noise[1], followed_schedule()
            factor = self.samples_generator.temperature_factor if schedule is not None else 1.0
            self.experience_maker.training_step, self.noise_step = global_step, global_step + 1
            status, global_step = super().train_step(rollout_samples, global_step)
            add_measures(status, self.experience_maker.step_measures)
            updates = status.get("optimizer_steps")
            if updates == 0.0:
                print(NO_UPDATE.format(step=global_step, responses=len(rollout_samples)), flush=True)
            elif updates is not None and status.get("zero_gradients") == updates:
                print(NO_GRADIENT.format(step=global_step, updates=updates), flush=True)
            self.experience_maker.step_measures = {}
            if run.perturbation is not None:
                status |= neighbor_drift(self.vllm_engines)
            if run.policy_noise is not None:
                status["policy_noise/scale"] = rolled_out
            if schedule is not None:
                status["sampling/temperature"] = self.args.rollout.temperature * factor
                self.past_steps = (*self.past_steps, PastStep(factor, self.experience_maker.rollout_entropy))
                self.choose_temperature()
            return status, global_step

        def choose_temperature(self) -> None:
            """Sets the factor of the temperature in the next step's requests."""
            schedule = followed_schedule()
            if schedule is not None:
                self.samples_generator.temperature_factor = schedule.factor_of_step(self.past_steps, run_of(self))

        def broadcast_to_vllm(self) -> None:
            noise = current_run().policy_noise
            if noise is None:
                return super().broadcast_to_vllm()
            if self.noise[0] != self.noise_step:
                total = steps_of_run(self.args, len(self.prompts_dataloader))
                scale = noise.scale(self.noise_step, total, self.noise[1], self.experience_maker.rollout_divergence)
                self.noise = (self.noise_step, scale)
            self.send_weights(self.noise[1])

        def evaluate(self, *args: object, **kwargs: object) -> Any:
            if current_run().policy_noise is None:
                return super().evaluate(*args, **kwargs)
            self.send_weights(0.0)
            try:
                return super().evaluate(*args, **kwargs)
            finally:
                self.send_weights(self.noise[1])

        def send_weights(self, scale: float | None) -> None:
            """Sends the engines weights with this noise."""
            import ray

            group = self.actor_model_group
            ray.get(group.async_run_method(method_name="set_policy_noise", scale=scale, sync=self.noise_step))
            super().broadcast_to_vllm()

        def save_logs_and_checkpoints(self, step: int, status: Mapping[str, Any], states: dict[str, Any]) -> None:
            states[_STATE] = {  # the best checkpoint is then saved with the same ones
                "rollout_round": getattr(getattr(self, "samples_generator", None), "rollout_round", 0),
                "visits": self.experience_maker.visits,
                "noise": self.noise,
                "past_steps": [astuple(step) for step in self.past_steps],
            }
            super().save_logs_and_checkpoints(step, status, states)
            if self.tensorboard_logger:  # which flushes every two minutes: a run that is killed keeps its steps
                self.tensorboard_logger.writer.flush()
            self.report_step(step, status, states["data_loader_state_dict"])

        def report_step(self, step: int, status: Mapping[str, Any], of_loader: Mapping[str, Any]) -> None:
            """Prints a line on a step, and adds one to the file that `ngrpo compare` follows."""
            length = of_loader.get(_LENGTH)  # in an asynchronous run the generator has the loader
            line = {"step": step, "steps": steps_of_run(self.args, length or len(self.prompts_dataloader))}
            line |= {"reward": status["rollout/reward_mean"], "seconds": status["timing/step_total"]}
            print("ngrpo: step {step}: reward {reward:.3f}, {seconds:.0f} s".format(**line), flush=True)
            with suppress(OSError), open(f"{current_run().run_dir}/{PROGRESS}", "a") as file:
                file.write(json.dumps(line) + "\n")

    return PerturbedTrainer


def generate_samples_actor(plain: type) -> type:
    """A subclass of `GenerateSamplesActor`: its round, and how long its dataloader is, go with that one's state."""

    class ResumingGenerator(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            loader, generator = self.prompts_dataloader, self.samples_generator
            length, of_loader = len(loader), loader.state_dict
            loader.state_dict = lambda: {**of_loader(), _ROUND: generator.rollout_round, _LENGTH: length}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.samples_generator.rollout_round = state_dict.get(_ROUND, 0)
            super().load_state_dict({key: state_dict[key] for key in state_dict if key not in (_ROUND, _LENGTH)})

    return ResumingGenerator


@around
def prepare_datasets(
    original: Callable[..., Any], strategy: DeepspeedStrategy, tokenizer: PreTrainedTokenizerBase
) -> Any:
    """`prepare_datasets`: under ``--reproducible`` the order of the prompts follows ``--train.seed``."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(require(strategy.args, "strategy.args").train.seed)
        return original(strategy, tokenizer)


@around
def preprocess_data(
    original: Callable[..., Any],
    data: Mapping[str, Any],
    input_template: str | None = None,
    input_key: str = "input",
    label_key: str | None = None,
    apply_chat_template: MethodType | None = None,
) -> tuple[str, Any]:
    """`preprocess_data`: conversations, tools and the template's arguments become text as in evaluation."""

    def apply(chat: conversation.Messages, **_: object) -> str:
        own = conversation.template_arguments(current_run().chat_template_kwargs)
        try:
            arguments = {**own, **conversation.tools_of(data)}
            return conversation.rendered(require(apply_chat_template, "the template").__self__, chat, arguments)
        except UsageError as error:
            raise UsageError(f"the prompt {chat!r:.200}: {error}") from None

    return original(data, input_template, input_key, label_key, apply_chat_template and apply)


def followed_schedule() -> SamplingSchedule | None:
    """The run's sampling schedule if it chooses a temperature for each step."""
    schedule = current_run().sampling_schedule
    return schedule if schedule is not None and schedule.follows_training else None


def run_of(trainer: Any) -> Run:
    """The run of OpenRLHF's trainer, for a schedule."""
    args = trainer.args
    steps = steps_of_run(args, len(trainer.prompts_dataloader))
    return Run(steps, args.rollout.temperature, vocabulary(args.actor.model_name_or_path))


def steps_of_run(args: argparse.Namespace, prompts: int) -> int:
    """Training steps of a run, of which the last in an episode may be short; fewer if prompts are filtered out."""
    return max(1, args.train.num_episodes * ceil(prompts / args.rollout.batch_size))


@lru_cache(maxsize=1)
def vocabulary(model: str) -> int:
    """V of a model, from its configuration."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model, trust_remote_code=True).get_text_config().vocab_size


def add_measures(status: dict[str, Any], measures: Mapping[str, float]) -> None:
    """Adds a step's measures to OpenRLHF's status, and turns the sums of the replay into means."""
    status.update(measures)
    for mean, (total, count) in MEAN_METRICS.items():
        total, count = status.pop(total, 0.0), status.pop(count, 0.0)
        if count:
            status[mean] = total / count


def neighbor_drift(engines: Sequence[Any] | None) -> dict[str, float]:
    """Shares of neighbor sets that the step's weight sync changed, over all engines; empty without neighbors."""
    import ray

    from perturbations.neighbors import Drift

    counts = ray.get([engine.perturbation_drift.remote() for engine in engines or ()])
    total = sum((Drift(*each) for each in counts if each is not None), Drift(0, 0, 0, 0))
    return {f"perturbation/{name}": share for name, share in total.shares().items()}
