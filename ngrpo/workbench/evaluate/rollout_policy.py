# SPDX-License-Identifier: Apache-2.0
"""The sampling schedule and the noise on the weights with which a given training step draws its rollouts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngrpo.config.kinds import KINDS
from ngrpo.config.run import RunConfig
from perturbations.errors import UsageError, require

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from vllm import LLM

    from ngrpo.methods.policy_noises.base import PolicyNoise
    from ngrpo.methods.sampling_schedules.base import SamplingSchedule

# The keys of `RolloutPolicy.described`.
DESCRIBED = ("sampling_schedule", "policy_noise", "training_step", "sigma")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


@dataclass(frozen=True)
class RolloutPolicy:
    """How one training step draws rollouts, apart from their perturbation; :meth:`of` checks it.

    Attributes:
        run: only its sampling schedule and its noise on the weights count.
        step: the training step, from 0.
        steps: training steps of the whole run; None where nothing depends on it.
    """

    run: RunConfig = field(default_factory=RunConfig)
    step: int = 0
    steps: int | None = None

    @classmethod
    def of(cls, run: RunConfig, step: int = 0, steps: int | None = None) -> RolloutPolicy:
        """The policy of a run, checked.

        Raises:
            UsageError: for a schedule that follows a training, a σ that depends on a run's length which is not given,
                or a step that no run has.
        """
        if step < 0 or (steps is not None and not step < steps):
            last = "" if steps is None else f" to {steps - 1}, the last of --of-steps {steps}"
            raise UsageError(f"--at-step {step}: must be a training step, from 0{last}.")
        policy = cls(run, step, steps)
        if policy.schedule is not None and policy.schedule.follows_training:
            raise UsageError(
                f"--sampling.schedule {policy.schedule.name} follows a training's rollouts, and there is none here."
                " Leave it out, or set a --temperature."
            )
        if policy.noise is not None and steps is None:
            lengths = (step + 1, 10 * (step + 1), 1000 * (step + 1))
            if len({policy.noise.scale(step, length, None, None) for length in lengths}) > 1:
                raise UsageError(
                    f"--policy_noise {policy.noise.name}: its σ depends on how long the training is. Add --of-steps N,"
                    " the run's number of training steps."
                )
        return policy

    @property
    def specs(self) -> dict[str, Any]:
        """The spec of each kind in use that changes rollouts."""
        return {name: dict(spec) for name, spec in self.run.specs.items() if KINDS[name].in_rollouts}

    @property
    def schedule(self) -> SamplingSchedule | None:
        return self.run.sampling_schedule

    @property
    def noise(self) -> PolicyNoise | None:
        return self.run.policy_noise

    @property
    def scale(self) -> float:
        """σ of the weights at the step; 0 where there is no noise."""
        return 0.0 if self.noise is None else self.noise.scale(self.step, self.steps or self.step + 1, None, None)

    @property
    def plain(self) -> bool:
        """Whether the model's own policy draws, at one temperature."""
        return not self.specs

    @property
    def notes(self) -> list[str]:
        """Warnings about the step."""
        if self.noise is None or self.scale > 0.0:
            return []
        return [f"--policy_noise {self.noise.name} has no noise at training step {self.step}: give another --at-step N"]

    def check_temperature(self, temperature: float) -> None:
        """Raises ``UsageError`` for a schedule with greedy responses, which no temperature changes."""
        if self.schedule is not None and temperature == 0.0:
            raise UsageError(
                f"--sampling.schedule {self.schedule.name} has no effect with --temperature 0. Leave one of them out."
            )

    def described(self) -> dict[str, Any]:
        """For a result file: the specs, the step, and σ; empty where :attr:`plain`."""
        if self.plain:
            return {}
        return {**self.specs, "training_step": self.step, **({} if self.noise is None else {"sigma": self.scale})}


@contextmanager
def noisy_model(model: str, policy: RolloutPolicy) -> Iterator[Any]:
    """The Hugging Face model of a folder or hub name, in its own dtype, with the noise of a policy on its weights.

    The noise is that of a training on a CPU with the same model at this step; other devices draw other noise.
    """
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    with require(policy.noise, "policy noise").added(dict(loaded.named_parameters()), policy.scale, policy.step):
        yield loaded


@contextmanager
def noisy_folder(model: str, policy: RolloutPolicy) -> Iterator[str]:
    """A temporary model folder with noise on its weights; without noise the model itself."""
    if not policy.scale:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="ngrpo-noisy-") as name:
        folder, source = Path(name), Path(model).expanduser()
        with noisy_model(model, policy) as loaded:
            loaded.save_pretrained(folder)
        # The tokenizer and all other files that belong to the weights.
        if source.is_dir():
            for file in source.iterdir():
                if file.is_file() and not file.name.endswith(_WEIGHTS) and not (folder / file.name).exists():
                    shutil.copy(file, folder)
        else:
            from transformers import AutoTokenizer

            tokenizer: Any = AutoTokenizer.from_pretrained(model)
            tokenizer.save_pretrained(folder)
        yield name


@contextmanager
def noisy_engine(llm: LLM, model: str, policy: RolloutPolicy) -> Iterator[None]:
    """An idle engine of this folder or hub name with noise on its weights, and with its own weights afterwards."""
    if not policy.scale:
        yield
        return
    with noisy_model(model, policy) as loaded:
        _load_weights(llm, loaded)
    try:
        yield
    finally:
        _load_weights(llm, loaded)  # the noise has been taken off again


def _load_weights(llm: LLM, loaded: PreTrainedModel) -> None:
    from ngrpo.trainers.common import weights_file

    dtype = llm.llm_engine.model_config.dtype
    weights = {name: p.detach().to(dtype).contiguous() for name, p in loaded.named_parameters()}
    with weights_file.written(weights) as path:

        def load(worker: Any) -> int:
            return weights_file.load_weights_file(worker, path)

        llm.llm_engine.collective_rpc(load)
        llm.llm_engine.reset_prefix_cache()
