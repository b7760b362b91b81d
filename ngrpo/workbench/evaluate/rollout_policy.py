# SPDX-License-Identifier: Apache-2.0
"""What the rollouts of a training have beside a perturbation, without the training: a schedule, noise on the weights.

Both change over a training, so they are taken as they are at one of its steps.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngrpo.config.kinds import KINDS
from ngrpo.config.run import RunConfig
from perturbations.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from vllm import LLM

    from ngrpo.methods.policy_noises.base import PolicyNoise
    from ngrpo.methods.sampling_schedules.base import SamplingSchedule

AT_STEP, OF_STEPS = "--at-step", "--of-steps"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


@dataclass(frozen=True)
class RolloutPolicy:
    """How the rollouts of one training step are drawn, beside their perturbation.

    Attributes:
        run: what asks for a sampling schedule and noise on the weights; nothing else of it counts.
        step: the training step, from 0.
        steps: training steps of the whole run; None where nothing depends on it.
    """

    run: RunConfig = field(default_factory=RunConfig)
    step: int = 0
    steps: int | None = None

    @classmethod
    def of(cls, run: RunConfig, step: int = 0, steps: int | None = None) -> RolloutPolicy:
        """What a run asks for, checked.

        Raises:
            UsageError: for a schedule that follows a training, a σ that depends on a run's length which is not given,
                or a step that no run has.
        """
        policy = cls(run, step, steps)
        policy.check()
        return policy

    @property
    def specs(self) -> dict[str, Any]:
        """The spec of each kind that is asked for and changes rollouts."""
        return {name: dict(spec) for name, spec in self.run.specs.items() if KINDS[name].in_rollouts}

    @property
    def schedule(self) -> SamplingSchedule | None:
        """The sampling schedule."""
        return self.run.sampling_schedule

    @property
    def noise(self) -> PolicyNoise | None:
        """The noise on the weights."""
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
        """What to know of the step."""
        if self.noise is None or self.scale > 0.0:
            return []
        return [
            f"--policy_noise {self.noise.name} has no noise at training step {self.step}: {AT_STEP} N takes another one"
        ]

    def check(self) -> None:
        """Raises ``UsageError`` as :meth:`of`."""
        if self.step < 0 or (self.steps is not None and not self.step < self.steps):
            last = "" if self.steps is None else f" to {self.steps - 1}, the last of {OF_STEPS} {self.steps}"
            raise UsageError(f"{AT_STEP} {self.step}: must be a training step, from 0{last}.")
        if self.schedule is not None and self.schedule.follows_training:
            raise UsageError(
                f"--sampling.schedule {self.schedule.name} chooses its temperature by the rollouts of a training, and"
                " there is none here. Leave it out; --temperature sets another one."
            )
        if self.noise is not None and self.steps is None:
            lengths = (self.step + 1, 10 * (self.step + 1), 1000 * (self.step + 1))
            if len({self.noise.scale(self.step, steps, None, None) for steps in lengths}) > 1:
                raise UsageError(
                    f"--policy_noise {self.noise.name}: its σ depends on how long the training is. Add {OF_STEPS} N,"
                    " the run's number of training steps."
                )

    def check_temperature(self, temperature: float) -> None:
        """Raises ``UsageError`` where a schedule meets greedy answers, which no temperature changes."""
        if self.schedule is not None and temperature == 0.0:
            raise UsageError(
                f"--sampling.schedule {self.schedule.name} cannot be used with --temperature 0: which token is the"
                " likeliest does not depend on the temperature. Leave one of them out."
            )

    def described(self) -> dict[str, Any]:
        """For a result file: the specs, the step, and σ; empty where :attr:`plain`."""
        if self.plain:
            return {}
        return {**self.specs, "training_step": self.step, **({} if self.noise is None else {"sigma": self.scale})}


@contextmanager
def noisy_model(model: str, policy: RolloutPolicy) -> Iterator[Any]:
    """The Hugging Face model with the noise of a policy on its weights, in its own dtype.

    On a CPU it is the noise that a training on a CPU with the same model has at this step; on another device a training
    draws other noise of the same kind.

    Args:
        model: a folder or hub name.
        policy: with noise.
    """
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    assert policy.noise is not None
    with policy.noise.added(dict(loaded.named_parameters()), policy.scale, policy.step):
        yield loaded


@contextmanager
def noisy_folder(model: str, policy: RolloutPolicy) -> Iterator[str]:
    """A model folder with noise on its weights, for as long as it is needed; without noise the model itself."""
    if not policy.scale:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="ngrpo-noisy-") as folder:
        with noisy_model(model, policy) as loaded:
            loaded.save_pretrained(folder)
        _copy_rest(model, Path(folder))
        yield folder


def _copy_rest(model: str, folder: Path) -> None:
    """The tokenizer and whatever else stands beside the weights."""
    source = Path(model).expanduser()
    if not source.is_dir():
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        tokenizer.save_pretrained(folder)
        return
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHTS) and not (folder / file.name).exists():
            shutil.copy(file, folder)


@contextmanager
def noisy_engine(llm: LLM, model: str, policy: RolloutPolicy) -> Iterator[None]:
    """An engine in this process with noise on its weights; with the model's own ones again after it.

    Args:
        llm: of `ngrpo.workbench.diagnose.group_sampling.build`, idle.
        model: what it was built from, a folder or hub name.
        policy: of its rollouts.
    """
    if not policy.scale:
        yield
        return
    with noisy_model(model, policy) as loaded:
        _load(llm, loaded)
    try:
        yield
    finally:
        _load(llm, loaded)  # the noise has been taken off again


def _load(llm: LLM, loaded: PreTrainedModel) -> None:
    from safetensors.torch import save_file

    from ngrpo.trainers.common.weights_file import load_weights_file

    dtype = llm.llm_engine.model_config.dtype
    handle, path = tempfile.mkstemp(prefix="ngrpo-noisy-", suffix=".safetensors")
    os.close(handle)
    try:
        save_file({name: p.detach().to(dtype).contiguous() for name, p in loaded.named_parameters()}, path)

        def load(worker: Any) -> int:
            return load_weights_file(worker, path)

        llm.llm_engine.collective_rpc(load)
        llm.llm_engine.reset_prefix_cache()
    finally:
        os.unlink(path)
