# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's ``PPOTrainer``, the loop over steps. Its halves where training is asynchronous: async_trainer.py."""

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import lru_cache
from types import MethodType
from typing import Any

from ngrpo.config.run import PROGRESS, current_run
from ngrpo.machine.models import conversation
from ngrpo.machine.upstream import rollout_sizes
from ngrpo.machine.upstream.patch import around
from ngrpo.machine.upstream.types import DeepspeedStrategy, Experience, PreTrainedTokenizerBase, Upstream
from ngrpo.methods.sampling_schedules.base import PastStep, Run, SamplingSchedule
from ngrpo.trainers.openrlhf.actor_trainer import MEAN_METRICS
from ngrpo.trainers.openrlhf.model_actors import SyncNoise
from perturbations.errors import UsageError, require

_STATE = "ngrpo"
"""Our part of the states in a checkpoint of OpenRLHF."""
OurStates = Mapping[str, Any]
"""Our part of a checkpoint's states, as :meth:`PerturbedTrainer.our_states` makes it."""
_FINISHED = "_iterator_finished"
"""The entry of torchdata's loader for a pass over the prompts that has ended."""
LENGTH = "ngrpo_length"
"""Our entry for the loader's length in the state of an asynchronous run's dataloader."""


def trainer(plain: type) -> type:
    """The subclass of `PPOTrainer`.

    It is not of the base `BasePPOTrainer`, since ``@ray.remote`` copies inherited methods into the class it
    decorates.
    """
    return type(plain.__name__, (PerturbedTrainer, plain), {})


class PerturbedTrainer(Upstream):
    """What goes in front of `PPOTrainer`, and under `AsyncTrainer` of `TrainingActor`.

    A run without a feature skips its line.

    Attributes:
        next_rollout_step: the training step that trains the next rollouts, from 0.
        noise: of the engines, as it was last chosen.
        past_steps: for the sampling schedule.
        weight_version: of the trainer's weights: the number of weight syncs that it has made in this process.
    """

    next_rollout_step = 0
    weight_version = 0
    noise = SyncNoise(step=-1, sigma=None)
    past_steps: tuple[PastStep, ...] = ()

    def init_checkpoint_states(self) -> dict[str, Any]:
        run = current_run()
        states = super().init_checkpoint_states()
        if states.get("data_loader_state_dict", {}).get(_FINISHED):
            # The step had the last prompts of its episode, and found no more. The loader then begins the next episode,
            # which OpenRLHF 0.11.2 would take for the one that is complete, and train one more than asked for.
            states["episode"] += 1
        self.next_rollout_step = states["global_step"]
        if _STATE in states:
            self.restore(states[_STATE])
        is_fresh = self.next_rollout_step == 0
        # The first rollout's weights have noise too. With 4 bits they are the dequantised ones, and an engine has the
        # checkpoint's until the first weight sync. A resumed run sends its weights itself.
        if is_fresh and (run.policy_noise is not None or self.args.ds.load_in_4bit):
            self.broadcast_to_vllm()
        self.choose_temperature()
        if run.eval_at_start and is_fresh:
            self.evaluate_first_weights()
        return states

    def evaluate_first_weights(self) -> None:
        """Evaluates before the first step, where the run has problems for it."""
        if self.eval_dataloader:
            options = self.args.eval
            sampling = {"temperature": options.temperature, "n_samples_per_prompt": options.n_samples_per_prompt}
            self.evaluate(0, **{**self.generate_kwargs, **sampling})

    def restore(self, ours: OurStates) -> None:
        """Goes on with our part of a checkpoint's states."""
        if hasattr(self, "samples_generator"):  # in an asynchronous run the generator has the round
            self.samples_generator.rollout_round = ours["rollout_round"]
        # Checkpoints of earlier releases have COPO's counts and SPO's values under "visits".
        self.experience_maker.prompt_memory = ours.get("prompt_memory", ours.get("visits"))
        self.noise = SyncNoise(*ours["noise"])
        self.past_steps = tuple(PastStep(*step) for step in ours["past_steps"])
        if hasattr(self.kl_ctl, "target") and "kl_coefficient" in ours:  # the flags have a fixed one
            self.kl_ctl.value = ours["kl_coefficient"]

    def train_step(self, rollout_samples: list[Experience], global_step: int) -> tuple[dict[str, Any], int]:
        run = current_run()
        schedule = followed_schedule()
        # The noise and the temperature of the rollouts that this step trains on.
        rollout_noise = self.noise.sigma
        rollout_factor = self.samples_generator.temperature_factor if schedule is not None else 1.0
        self.experience_maker.training_step = global_step
        self.experience_maker.weight_version = self.weight_version
        self.next_rollout_step = global_step + 1
        status, global_step = super().train_step(rollout_samples, global_step)
        add_measures(status, self.experience_maker.step_measures)
        self.experience_maker.step_measures = {}
        if run.sampling.max_staleness is not None:
            status["staleness/left_out"] = float(self.rollout_queue.take_left_out())
        warn_of_untrained(status, global_step, rollout_samples)
        if run.perturbation is not None:
            status |= neighbor_drift(self.vllm_engines)
        if run.policy_noise is not None:
            status["policy_noise/scale"] = rollout_noise
        if schedule is not None:
            status["sampling/temperature"] = self.args.rollout.temperature * rollout_factor
            self.past_steps = (*self.past_steps, PastStep(rollout_factor, self.experience_maker.rollout_entropy))
            self.choose_temperature()
        return status, global_step

    def ppo_train(self, global_steps: int) -> dict[str, float]:
        status = super().ppo_train(global_steps)
        if global_steps <= self.args.critic.freezing_steps:
            import ray

            # OpenRLHF 0.11.2 would keep the rollouts of frozen steps and train all of them in the policy's first step,
            # with as many updates more; a checkpoint lacks them.
            ray.get(self.actor_model_group.async_run_method(method_name="drop_rollouts"))
        return status

    def choose_temperature(self) -> None:
        """Sets the factor of the temperature in the next step's requests."""
        schedule = followed_schedule()
        if schedule is not None:
            factor = schedule.factor_of_step(self.past_steps, run_of(self))
            if not (math.isfinite(factor) and factor > 0.0):
                raise RuntimeError(
                    f"--sampling.schedule {schedule.name}: factor_of_step() gives {factor} for training step"
                    f" {len(self.past_steps)}; must be finite and above 0."
                )
            self.samples_generator.temperature_factor = factor

    def broadcast_to_vllm(self) -> None:
        noise = current_run().policy_noise
        if noise is None:
            super().broadcast_to_vllm()
            self.weight_version += 1
            return
        if self.noise.step != self.next_rollout_step:
            total = steps_of_run(self.args, len(self.prompts_dataloader))
            divergence = self.experience_maker.rollout_divergence
            sigma = noise.scale(self.next_rollout_step, total, self.noise.sigma, divergence)
            self.noise = SyncNoise(step=self.next_rollout_step, sigma=sigma)
        self.send_weights(self.noise.sigma)

    def evaluate(self, *args: object, **kwargs: object) -> Any:
        if current_run().policy_noise is None:
            return super().evaluate(*args, **kwargs)
        self.send_weights(0.0)
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            self.send_weights(self.noise.sigma)

    def send_weights(self, scale: float | None) -> None:
        """Sends the engines weights with noise of this σ."""
        import ray

        group = self.actor_model_group
        ray.get(group.async_run_method(method_name="set_policy_noise", scale=scale, step=self.next_rollout_step))
        super().broadcast_to_vllm()
        self.weight_version += 1

    def our_states(self) -> dict[str, object]:
        """Our part of a checkpoint's states, with which :meth:`restore` goes on."""
        return {
            "rollout_round": getattr(getattr(self, "samples_generator", None), "rollout_round", 0),
            "prompt_memory": self.experience_maker.prompt_memory,
            "noise": tuple(self.noise),  # no class of ours, so that an earlier release reads it too
            "past_steps": [astuple(step) for step in self.past_steps],
            # OpenRLHF 0.11.2 adapts it with --algo.kl.target, and leaves it out of its own states.
            "kl_coefficient": self.kl_ctl.value,
        }

    def save_logs_and_checkpoints(self, step: int, status: Mapping[str, Any], states: dict[str, Any]) -> None:
        # In place, since OpenRLHF saves the best checkpoint with the same states.
        states[_STATE] = self.our_states()
        super().save_logs_and_checkpoints(step, status, states)
        if self.tensorboard_logger:
            # Its writer flushes every two minutes only; so a run that is killed keeps its steps.
            self.tensorboard_logger.writer.flush()
        self.report_step(step, status, states["data_loader_state_dict"])

    def report_step(self, step: int, status: Mapping[str, Any], loader_state: Mapping[str, Any]) -> None:
        """Prints a line on a step, and adds one to the file that `ngrpo compare` follows."""
        # In an asynchronous run the generator has the loader, and its length comes with the state.
        length = loader_state.get(LENGTH) or len(self.prompts_dataloader)
        reward = status["rollout/reward_mean"]
        seconds = status["timing/step_total"]
        print(f"ngrpo: step {step}: reward {reward:.3f}, {seconds:.0f} s", flush=True)
        line = {"step": step, "steps": steps_of_run(self.args, length), "reward": reward, "seconds": seconds}
        with suppress(OSError), open(f"{current_run().run_dir}/{PROGRESS}", "a") as file:
            file.write(json.dumps(line) + "\n")


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

    if apply_chat_template is None:
        return original(data, input_template, input_key, label_key, None)
    tokenizer = apply_chat_template.__self__

    def apply(chat: conversation.Messages, **_: object) -> str:
        run_arguments = conversation.template_arguments(current_run().chat_template_kwargs)
        try:
            arguments = {**run_arguments, **conversation.tools_of(data)}
            return conversation.rendered(tokenizer, chat, arguments)
        except UsageError as error:
            raise UsageError(f"the prompt {chat!r:.200}: {error}") from None

    return original(data, input_template, input_key, label_key, apply)


def followed_schedule() -> SamplingSchedule | None:
    """The run's sampling schedule if it chooses a temperature for each step."""
    schedule = current_run().sampling_schedule
    return schedule if schedule is not None and schedule.follows_training else None


def run_of(trainer: Any) -> Run:
    """The run of OpenRLHF's trainer, for a schedule."""
    args = trainer.args
    return Run(
        steps_of_run(args, len(trainer.prompts_dataloader)),
        args.rollout.temperature,
        vocabulary(args.actor.model_name_or_path),
    )


def steps_of_run(args: argparse.Namespace, prompts: int) -> int:
    """Training steps of a run, of which the last in an episode may be short; fewer if prompts are filtered out."""
    batch = args.rollout.batch_size
    prompts_of_step = rollout_sizes.prompts_of_step(batch, getattr(args.rollout, "vllm_generate_batch_size", None))
    return max(1, args.train.num_episodes * math.ceil(prompts / prompts_of_step))


@lru_cache(maxsize=1)
def vocabulary(model: str) -> int:
    """V of a model, from its configuration."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model, trust_remote_code=True).get_text_config().vocab_size


def add_measures(status: dict[str, Any], measures: Mapping[str, float]) -> None:
    """Adds a step's measures to OpenRLHF's status, and turns the sums of the replay into means."""
    status.update(measures)
    for mean, (sum_name, count_name) in MEAN_METRICS.items():
        total = status.pop(sum_name, 0.0)
        count = status.pop(count_name, 0.0)
        if count:
            status[mean] = total / count


def warn_of_untrained(status: Mapping[str, Any], step: int, rollout_samples: Sequence[Experience]) -> None:
    """Warns of a step without an optimizer step, one that left out responses, or gradients of 0 in all updates.

    Args:
        status: of the step.
        step: its number, from 1.
        rollout_samples: the responses of its rollout.
    """
    updates = status.get("optimizer_steps")
    if updates == 0.0:
        print(
            f"ngrpo: warning: step {step} made no optimizer step: {len(rollout_samples)} responses do not fill"
            " --train.batch_size, as where prompts were filtered out or the last batch is a short one. The weights are"
            " those of the step before.",
            flush=True,
        )
    elif status.get("left_out_responses"):
        print(
            f"ngrpo: warning: step {step} left out {status['left_out_responses']:g} of its {len(rollout_samples)}"
            " responses: they do not fill a further --train.batch_size, as where prompts were filtered out or the last"
            " batch is a short one.",
            flush=True,
        )
    if updates and status.get("zero_gradients") == updates:
        print(
            f"ngrpo: warning: step {step} trained nothing: the gradient was exactly 0 in each of its updates"
            f" ({updates:g}). All advantages were 0, as where all responses to each prompt have the same reward, or"
            " the loss left out every token.",
            flush=True,
        )


def neighbor_drift(engines: Sequence[Any] | None) -> dict[str, float]:
    """Shares of neighbor sets that the step's weight sync changed, over all engines; empty without neighbors."""
    import ray

    from perturbations.neighbors import Drift

    drift_by_engine = ray.get([engine.perturbation_drift.remote() for engine in engines or ()])
    total = sum((Drift(*counts) for counts in drift_by_engine if counts is not None), Drift(0, 0, 0, 0))
    return {f"perturbation/{name}": share for name, share in total.shares().items()}
