# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine for evaluation: the policy that draws, and samples streamed out of it as they finish."""

from __future__ import annotations

import inspect
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ngrpo.config import compatibility
from ngrpo.config.kinds import KINDS
from ngrpo.config.run import RunConfig
from ngrpo.machine.hardware import processes, profile_for
from ngrpo.machine.models import conversation
from ngrpo.machine.upstream.types import LLM, PreTrainedModel, SamplingParams, TokenizerLike
from ngrpo.methods.scoring import Problem
from perturbations.errors import UsageError, nearest, require
from perturbations.options import Options, option
from perturbations.seeds import trajectory_seed

if TYPE_CHECKING:
    from perturbations.replay import ReplayRecord

# Requests that wait inside the engine; more than any engine runs at once, few enough to be cheap.
_WINDOW = 2048
# The kinds of a `RolloutPolicy`, and the keys of its `described`.
POLICY_KINDS = ("sampling_schedule", "policy_noise")
DESCRIBED = (*POLICY_KINDS, "training_step", "sigma")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


class Job(NamedTuple):
    """A request for one response: the prompt's tokens, the seed that all its samples share, and the sample's number."""

    prompt: list[int]
    seed: int
    sample: int


@dataclass(frozen=True)
class Sampling(Options):
    """How responses are drawn. Seed, prompt, its number of earlier repeats and the sample's number determine a draw."""

    kind = "sampling"

    temperature: float = option(0.6, "0 is greedy", low=0)
    top_p: float = option(0.95, "the nucleus", above=0, high=1)
    max_tokens: int = option(4096, "the longest response", low=1)
    seed: int = option(0, "of all draws", low=0)


@dataclass(frozen=True)
class Generated:
    """One response.

    Attributes:
        job: its place in the list of jobs.
        text: without special tokens.
        tokens: all generated ones, with the end token.
        finish: ``stop``, or ``length`` where the limit cut it.
        record: of the perturbed inputs; None where the engine keeps no records.
    """

    job: int
    text: str
    tokens: list[int]
    finish: str
    record: ReplayRecord | None

    def end(self, tokenizer: TokenizerLike) -> str:
        """The text of the end token, such as ``<|im_end|>``, which ``text`` lacks; empty for a response that was cut.

        OpenRLHF decodes it with the response that a reward function reads.
        """
        if self.finish != "stop" or not self.tokens:
            return ""
        return tokenizer.decode(self.tokens[-1:], skip_special_tokens=False)


# --- the policy ---------------------------------------------------------------------------------------
# Its sampling schedule and the noise on its weights, with which a given training step draws its rollouts.


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
        if not 0 <= step < (math.inf if steps is None else steps):
            last = "" if steps is None else f" to {steps - 1}, the last of --of-steps {steps}"
            raise UsageError(f"--at-step {step}: must be a training step, from 0{last}.")
        schedule = run.sampling_schedule
        if schedule is not None and schedule.follows_training:
            raise UsageError(
                f"--sampling.schedule {schedule.name} follows a training's rollouts, and there is none here."
                " Leave it out, or set a --temperature."
            )
        noise = run.policy_noise
        if noise is not None and steps is None:
            # A noise whose σ is the same in short and long runs does not depend on their length.
            lengths = (step + 1, 10 * (step + 1), 1000 * (step + 1))
            if len({noise.scale(step, length, None, None) for length in lengths}) > 1:
                raise UsageError(
                    f"--policy_noise {noise.name}: its σ depends on how long the training is. Add --of-steps N,"
                    " the run's number of training steps."
                )
        return cls(run, step, steps)

    @property
    def specs(self) -> dict[str, Any]:
        """The spec of each kind in use that changes rollouts."""
        return {name: dict(spec) for name, spec in self.run.specs.items() if KINDS[name].in_rollouts}

    @property
    def scale(self) -> float:
        """σ of the noise on the weights at the step; 0 where there is no noise."""
        noise = self.run.policy_noise
        if noise is None:
            return 0.0
        return noise.scale(self.step, self.steps or self.step + 1, None, None)

    @property
    def notes(self) -> list[str]:
        """Warnings about the step."""
        noise = self.run.policy_noise
        if noise is None or self.scale > 0.0:
            return []
        return [f"--policy_noise {noise.name} has no noise at training step {self.step}: give another --at-step N"]

    def check_temperature(self, temperature: float) -> None:
        """Raises ``UsageError`` for a schedule with greedy responses, which no temperature changes."""
        schedule = self.run.sampling_schedule
        if schedule is not None and temperature == 0.0:
            raise UsageError(
                f"--sampling.schedule {schedule.name} has no effect with --temperature 0. Leave one of them out."
            )

    def described(self) -> dict[str, Any]:
        """For a result file: the specs, the step, and σ; empty where the model's own policy draws."""
        if not self.specs:
            return {}
        described = {**self.specs, "training_step": self.step}
        if self.run.policy_noise is not None:
            described["sigma"] = self.scale
        return described


@contextmanager
def noisy_model(model: str, policy: RolloutPolicy) -> Iterator[Any]:
    """The Hugging Face model of a folder or hub name, in its own dtype, with the noise of a policy on its weights.

    The noise is that of a training on a CPU with the same model at this step; other devices draw other noise.
    """
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    noise = require(policy.run.policy_noise, "policy noise")
    with noise.added(dict(loaded.named_parameters()), policy.scale, policy.step):
        yield loaded


@contextmanager
def noisy_folder(model: str, policy: RolloutPolicy) -> Iterator[str]:
    """A temporary model folder with noise on its weights; without noise the model itself."""
    if not policy.scale:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="ngrpo-noisy-") as name:
        folder = Path(name)
        source = Path(model).expanduser()
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
        llm.llm_engine.collective_rpc(partial(weights_file.load_weights_file, path=path))
        llm.llm_engine.reset_prefix_cache()


# --- the engine ---------------------------------------------------------------------------------------


def build(
    model: str,
    spec: Mapping[str, Any] | None,
    max_model_len: int,
    *,
    hardware: str = "auto",
    options: Mapping[str, Any] | None = None,
    policy: RolloutPolicy = RolloutPolicy(),
) -> Any:
    """A ``vllm.LLM`` of a folder or hub name, with reproducible token draws, perturbed or not.

    Args:
        spec: of the perturbation, or None.
        max_model_len: tokens of prompt and response together.
        options: keyword arguments of ``vllm.LLM``, over the defaults here.

    Raises:
        UsageError: where vLLM refuses, or would refuse, the model or the options.
    """
    profile = profile_for(hardware)
    compatibility.check_model(model, profile.name)
    environment = {**profile.env, "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        sys.stdout.fileno()
    except (OSError, AttributeError):  # a notebook's stream; vLLM 0.29 needs a descriptor for an engine in this process
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    import vllm

    if options:
        _check_names(options)
    settings: dict[str, Any] = {
        "max_model_len": max_model_len,
        "enforce_eager": "--vllm.enforce_eager" in profile.default_flags,
        "disable_log_stats": True,
        **(options or {}),
    }
    # Without a perturbation too: token draws that depend on the request alone, whatever else is in the batch.
    config: dict[str, Any] = {"perturbation": dict(spec or {"name": "none"}), "seeded_draws": True}
    if "sampling_schedule" in policy.specs:
        config["sampling_schedule"] = policy.specs["sampling_schedule"]
    with noisy_folder(model, policy) as loaded, processes.own_children():
        try:
            return vllm.LLM(loaded, additional_config=config, **settings)
        except (TypeError, ValueError) as error:  # vLLM's own checks of its arguments
            raise UsageError(f"vLLM does not start with {settings}: {error}") from error


def _check_names(options: Mapping[str, Any]) -> None:
    """Raises ``UsageError`` for a keyword argument that ``vllm.LLM`` and vLLM's engine do not have."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    names = {*inspect.signature(vllm.LLM.__init__).parameters, *inspect.signature(EngineArgs).parameters}
    names -= {"self", "kwargs"}
    for name in options:
        if name not in names:
            raise UsageError(f"vLLM has no engine option {name!r} (--vllm.{name}).{nearest(name, names)}")


def prepare(llm: LLM, spec: Mapping[str, Any] | None) -> bool:
    """Sets the perturbation of an engine built elsewhere, and returns whether its draws are reproducible.

    Raises ``RuntimeError`` where the engine has none installed, ``UsageError`` for a bad spec.
    """
    from ngrpo.rollout import set_perturbation

    if spec is not None:
        set_perturbation(llm, **spec)
    try:
        return all(llm.llm_engine.collective_rpc("perturbation_fingerprint"))
    except Exception:  # an engine without our plugin has no such procedure
        return False


def render(tokenizer: TokenizerLike, problem: Problem) -> str:
    """The prompt as the model sees it; ``UsageError`` with the problem's id where it cannot be rendered."""
    try:
        return conversation.rendered(tokenizer, problem.messages, problem.template)
    except UsageError as error:
        raise UsageError(f"problem {problem.id}: {error}") from None


def generate(
    llm: LLM,
    jobs: Sequence[Job],
    sampling: Sampling,
    *,
    perturbed: bool,
    reproducible: bool,
    step: int = 0,
    responses: int = 1,
) -> Generator[list[Generated], None, None]:
    """Responses to jobs, in the order in which they finish.

    Args:
        llm: an idle ``vllm.LLM``.
        perturbed: whether the engine's perturbation acts.
        reproducible: whether the engine has this project's token draws.
        step: the training step for a sampling schedule of the engine.
        responses: their number for each prompt, numbered from 0 on by the jobs' samples.

    Yields:
        The jobs that finished together. An iterator closed early aborts the running requests.
    """
    from ngrpo.rollout import take_records

    engine = llm.llm_engine
    live: dict[str, int] = {}  # the number of the job by the name of its request
    next_job = 0
    try:
        while live or next_job < len(jobs):
            while next_job < len(jobs) and len(live) < _WINDOW:
                job = jobs[next_job]
                name = f"eval-{next_job}"
                drawn_with = parameters(sampling, perturbed, reproducible, job, step=step, responses=responses)
                engine.add_request(name, {"prompt_token_ids": job.prompt}, drawn_with)
                live[name] = next_job
                next_job += 1
            outputs: list[Any] = engine.step()
            finished = {output.request_id: output.outputs[0] for output in outputs if output.finished}
            if not finished:
                continue
            records = take_records(llm, list(finished)) if reproducible else {}
            batch = []
            for name, response in finished.items():
                batch.append(
                    Generated(
                        job=live.pop(name),
                        text=response.text,
                        tokens=list(response.token_ids),
                        finish=str(response.finish_reason),
                        record=records.get(name),
                    )
                )
            yield batch
    finally:
        if live:
            engine.abort_request(list(live))


def parameters(
    sampling: Sampling, perturbed: bool, reproducible: bool, job: Job, *, step: int = 0, responses: int = 1
) -> SamplingParams:
    """vLLM's parameters of a job's request; arguments as in :func:`generate`."""
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    settings: dict[str, Any] = {}
    if reproducible:
        arguments = {"enabled": perturbed, "seed": job.seed, "sample": job.sample}
        if step:
            arguments["training_step"] = step
        if responses > 1:
            arguments["answer"] = job.sample
            arguments["answers"] = responses
        settings["extra_args"] = {"perturbation": arguments}
    elif torch.cuda.is_available():  # vLLM 0.29 on CPU fails with a seed per request once a prefill is chunked
        settings["seed"] = trajectory_seed(job.seed, job.sample)
    return SamplingParams(
        output_kind=RequestOutputKind.FINAL_ONLY,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        **settings,
    )
