# SPDX-License-Identifier: Apache-2.0
"""The run: everything that `ngrpo train` was asked to do, one object, the same in all of its processes.

:mod:`ngrpo.config.parse` makes it of a command line, and every Ray worker gets the object.
"""

from __future__ import annotations

import dataclasses
import shlex
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngrpo import patches
from ngrpo.config.kinds import KINDS, of_a_run
from ngrpo.machine.hardware import Profile, cuda, profile_for, stand_ins
from ngrpo.machine.storage.result_folder import write_text, writing
from ngrpo.machine.upstream import placement
from ngrpo.machine.upstream.openrlhf_flags import Default, Flags
from perturbations.errors import UsageError
from perturbations.options import Options, option

if TYPE_CHECKING:
    from ngrpo.methods.advantages.base import Advantage
    from ngrpo.methods.credits.base import Credit
    from ngrpo.methods.policy_noises.base import PolicyNoise
    from ngrpo.methods.sampling_schedules.base import SamplingSchedule
    from ngrpo.methods.second_rounds.base import SecondRound
    from perturbations.base import Perturbation

FILE = "run.yaml"
"""Name of the file in a run's folder that repeats it: ``ngrpo train --config runs/x/run.yaml``."""
PROGRESS = "progress.jsonl"
"""Name of the file with a line for each training step, written after it."""


def _setting(flag: str, default: object, about: str, **limits: Any) -> Any:
    """A setting with a flag of its own; range and help as those of an option."""
    return field(default=default, metadata={**option(default, about, **limits).metadata, "flag": flag})


GROUP_BASELINES = ("rloo", "reinforce_baseline", "dr_grpo", "group_norm")
"""OpenRLHF's estimators with a baseline over a prompt's responses; every preset has one of them."""
OF_OPENRLHF = {"temperature": "--rollout.temperature", "top_p": "--rollout.top_p"}
"""Options of the rollouts' sampling for which OpenRLHF has flags."""
OVERLONG = "--reward.overlong_buffer_len"
_GRPO: dict[str, Default] = {
    "--algo.advantage.estimator": "group_norm",
    "--actor.policy_loss_type": "ppo",
    "--actor.loss_agg_mode": "seq-mean-token-mean",
    "--algo.kl.use_loss": None,
    "--algo.kl.estimator": "k3",
}
PRESETS: dict[str, dict[str, Default]] = {
    # Shao et al., arXiv 2402.03300: the mean over a response's tokens, then over responses; k3 as a loss.
    "grpo": _GRPO,
    # Zheng et al., arXiv 2507.18071: the ratio is of the sequence, so its clip range is far narrower.
    "gspo": {**_GRPO, "--actor.policy_loss_type": "gspo", "--actor.eps_clip_low_high": ("0.0003", "0.0004")},
    # Yu et al., arXiv 2503.14476: clip-higher, dynamic sampling, token-mean loss, overlong penalty, no KL.
    "dapo": {
        "--algo.advantage.estimator": "group_norm",
        "--actor.policy_loss_type": "ppo",
        "--actor.loss_agg_mode": "token-mean",
        "--actor.eps_clip_low_high": ("0.2", "0.28"),
        "--algo.dynamic_filtering_enable": None,
        "--algo.dynamic_filtering_range": ("0", "1"),
        OVERLONG: None,  # follows from the longest response
        "--reward.overlong_penalty_factor": "1",
        "--algo.kl.init_coef": "0",
    },
}


@dataclass(frozen=True, kw_only=True)
class Sampling(Options):
    """``--sampling.*``: how rollouts draw tokens, how the loss corrects for it, how old a response may be.

    The defaults change nothing.
    """

    kind = "sampling"

    top_k: int | None = option(None, "draw rollout tokens from the k likeliest", low=1)
    min_p: float | None = option(None, "… from those with at least this share of the likeliest one's p", low=0, high=1)
    correct_mask: bool = option(False, "take log-probabilities among the tokens that top-p, top-k and min-p left")
    score_centering: bool = option(False, "subtract the mean of the loss's score over the draws of a token")
    mask_gib: float | None = option(None, "memory of a worker's records of these tokens, in GiB; 8 if none", above=0.0)
    correction_warmup: int | None = option(
        None, "training steps over which the importance weights of the loss grow from 1 to their whole", low=1
    )
    max_staleness: int | None = option(
        None, "asynchronous training leaves responses out that are older, in weight syncs", low=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_gib is not None and not self.records_masks:
            raise UsageError(
                f"--sampling.mask_gib {self.mask_gib:g} is the memory of --sampling.correct_mask or"
                " --sampling.score_centering, and neither is given. Add one of them, or leave this one out."
            )

    @property
    def records_masks(self) -> bool:
        """Whether each response comes with the tokens that top-p, top-k and min-p left."""
        return self.correct_mask or self.score_centering

    def given(self) -> dict[str, Any]:
        """The settings that are on.

        ``max_staleness`` is on at 0 too: it then leaves out every response of earlier weights.
        """
        settings = {name: value for name, value in self.spec().items() if value}
        if self.max_staleness is not None:
            settings["max_staleness"] = self.max_staleness
        return settings

    def filters(self) -> dict[str, Any]:
        """``top_k`` and ``min_p``, where set."""
        return {name: value for name, value in self.given().items() if name in ("top_k", "min_p")}

    def described(self, flags: Flags) -> dict[str, float | int | None]:
        """All settings of the rollouts' draws, with those of OpenRLHF, for the results; None for no truncation."""
        of_openrlhf = {name: float(flags.value(flag) or 1.0) for name, flag in OF_OPENRLHF.items()}
        ours = {name: getattr(self, name) for name in ("top_k", "min_p", "correct_mask", "score_centering")}
        return {**of_openrlhf, **ours}

    def truncations(self, flags: Flags) -> dict[str, Any]:
        """``top_k``, ``min_p`` and ``top_p``, where they cut tokens."""
        truncations = self.filters()
        top_p = float(flags.value(OF_OPENRLHF["top_p"]) or 1.0)
        if top_p < 1.0:
            truncations["top_p"] = top_p
        return truncations

    def notes(self, flags: Flags) -> list[str]:
        """A warning where the rollouts' distribution is truncated and the loss is of the whole one."""
        truncations = self.truncations(flags)
        if not truncations or self.records_masks:
            return []
        texts = [f"{name} {value}" for name, value in truncations.items()]
        return [  # docs/figures.md, `python -m benchmarks.sampling_mask`
            f"rollouts are drawn from a truncated distribution ({', '.join(texts)}), but"
            " the loss is of the whole one. On SmolLM2-135M each log-probability is off by 0.04 on average with top-p"
            " 0.95, by 0.06 with top-k 50 (at worst 0.96) and by 0.15 with min-p 0.05, always downwards, and a"
            " baseline is not free. Add --sampling.correct_mask or --sampling.score_centering."
        ]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run.

    Attributes:
        specs: of each kind of extension in use, by :attr:`ngrpo.config.kinds.Kind.name`, what its
            ``create(**spec)`` takes: ``{"perturbation": {"name": "neighbor", "rate": 0.1, ...}}``.
        gap_limit: how many times as large as expected the mismatch of log-probabilities may be, by the rules of
            :mod:`ngrpo.trainers.common.mismatch`.
        max_num_seqs, max_num_batched_tokens: None for vLLM's defaults of OpenRLHF's engines.
        openrlhf: OpenRLHF's flags, in their order.
        run_dir: folder for what this run writes, or None for a new one under ``runs/``.
        log_file: file for the output of the engines, with progress on screen; None: screen.
        notes: warnings for the user about the perturbation.
        machine: the GPUs that a dry run is for; None for those of this machine.
    """

    specs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    gap_limit: float = _setting("--perturbation.gap_limit", 10.0, "when the mismatch is too large", low=1)
    strict: bool = _setting("--perturbation.strict", False, "end the run there")
    reproducible: bool = _setting("--reproducible", False, "the same seed gives the same rollouts")
    eval_at_start: bool = _setting("--eval.at_start", False, "evaluate before the first step too")
    replay_routing: bool = _setting("--replay.routing", False, "train on the experts that the rollouts chose")
    report_groups: int = _setting("--report.groups", 0, "prompts with kept responses", low=0, high=16)
    max_num_seqs: int | None = _setting("--engine.max_num_seqs", None, "responses at once", low=1)
    max_num_batched_tokens: int | None = _setting("--engine.max_num_batched_tokens", None, "tokens of a step", low=1)
    preset: str | None = _setting("--preset", None, "a set of OpenRLHF's flags", choices=tuple(PRESETS))
    chat_template_kwargs: str | None = _setting("--chat_template_kwargs", None, "arguments of the chat template")
    task: str | None = _setting("--task", None, "dataset and reward")
    hardware: str = _setting("--hardware", "auto", "auto, cpu or cuda")
    openrlhf: tuple[str, ...] = ()
    run_dir: str | None = _setting("--run-dir", None, "the run's folder")
    log_file: str | None = _setting("--log-file", None, "what the engines print")
    notes: tuple[str, ...] = field(default=(), compare=False)
    machine: placement.Machine | None = field(default=None, compare=False)

    @cached_property
    def _extensions(self) -> dict[str, Any]:
        """The objects of the specs, as far as :meth:`part` has made them."""
        return {}

    def part(self, kind: str) -> Any:
        """The extension of a kind, made at its first use; None where the run has none."""
        if kind in self.specs and kind not in self._extensions:
            with warnings.catch_warnings():  # parse.run_config has put them into the notes
                warnings.simplefilter("ignore", UserWarning)
                self._extensions[kind] = KINDS[kind].create(**self.specs[kind])
        return self._extensions.get(kind)

    @property
    def profile(self) -> Profile:
        """The hardware profile; ``auto`` is CUDA too on a machine without a GPU that joins a cluster with some."""
        profile = profile_for(self.hardware)
        if self.hardware == "auto" and profile.name == "cpu":
            cluster = placement.cluster()
            # Nodes whose GPUs have no name may be CPUs: on a CPU, a GPU of Ray is a share of the machine.
            if cluster is not None and cluster.names_gpus:
                return profile_for("cuda")
        return profile

    @property
    def perturbation(self) -> Perturbation | None:
        """The perturbation of the rollouts; None where nothing is perturbed."""
        return self.part("perturbation")

    @property
    def advantage(self) -> Advantage | None:
        """The advantage; None for OpenRLHF's own estimator."""
        return self.part("advantage")

    @property
    def credit(self) -> Credit | None:
        """The credit; None where all tokens of a response have its advantage."""
        return self.part("credit")

    @property
    def policy_noise(self) -> PolicyNoise | None:
        """The noise on the weights that roll out; None where engines have the trainer's weights."""
        return self.part("policy_noise")

    @property
    def sampling_schedule(self) -> SamplingSchedule | None:
        """The schedule of temperatures; None for one temperature throughout."""
        return self.part("sampling_schedule")

    @property
    def second_round(self) -> SecondRound | None:
        """What asks for further responses to a prompt, such as where all are wrong; None for one round."""
        return self.part("second_round")

    @property
    def spec(self) -> Mapping[str, Any] | None:
        """``perturbations.create(**spec)``; None where nothing is perturbed."""
        return self.specs.get("perturbation")

    @property
    def methods(self) -> dict[str, Mapping[str, Any] | None]:
        """The spec of each kind that a result names; None where the run has none."""
        return {kind.name: self.specs.get(kind.name) for kind in of_a_run()}

    @property
    def engine_limits(self) -> dict[str, int]:
        """Arguments of vLLM's engines, as far as they are given."""
        limits = {"max_num_seqs": self.max_num_seqs, "max_num_batched_tokens": self.max_num_batched_tokens}
        return {name: value for name, value in limits.items() if value is not None}

    @property
    def configures_engines(self) -> bool:
        """Whether ngrpo configures the engines: they draw tokens in its own way, or record how they drew.

        Noise on the weights alone leaves the engines as they are.
        """
        has_own_draws = self.perturbation is not None or self.sampling_schedule is not None or self.reproducible
        return has_own_draws or self.has_side_records

    @property
    def has_side_records(self) -> bool:
        """Whether a response has more than a record of perturbed inputs: a sampling mask, or experts."""
        return self.sampling.records_masks or self.replay_routing

    @property
    def has_weight_versions(self) -> bool:
        """Whether responses carry the version of their weights: asynchronous training may use older ones.

        Not with partial rollouts, in which a weight sync may come between two tokens of a response.
        """
        flags = Flags(self.openrlhf)
        return flags.has("--train.async_enable") and not flags.has("--train.partial_rollout_enable")

    @property
    def rollout_policy_differs(self) -> bool:
        """Whether the policy that rolls out may be another one than the trainer's by design, so that it is measured."""
        return (
            self.perturbation is not None
            or self.policy_noise is not None
            or self.sampling_schedule is not None
            or self.sampling.correction_warmup is not None
            or self.sampling.records_masks
        )

    @property
    def conditions(self) -> tuple[str, ...]:
        """The conditions of `ngrpo.patches` that hold for this run."""
        conditions = {
            **{name: spec is not None for name, spec in self.methods.items()},
            "credit_in_loss": self.credit is not None and self.credit.acts_in_loss,
            "sampling": bool(self.sampling.given()),
            "sampling_mask": self.sampling.records_masks,
            "routing": self.replay_routing,
            "correction_warmup": self.sampling.correction_warmup is not None,
            "reproducible": self.reproducible,
            "eval_at_start": self.eval_at_start,
            "chat_template": Flags(self.openrlhf).has("--data.apply_chat_template"),
            "moving_average": Flags(self.openrlhf).has("--train.enable_ema"),
            "report_groups": self.report_groups > 0,
        }
        return tuple(name for name, holds in conditions.items() if holds)

    @property
    def training_conditions(self) -> tuple[str, ...]:
        """:attr:`conditions`, with those of a training and of its hardware."""
        on_cpu = self.profile.name == "cpu"
        of_hardware = {
            "cpu": on_cpu,
            "any_adam": not on_cpu and not cuda.is_moved_by_deepspeed(Flags(self.openrlhf)),
            stand_ins.WITHOUT_FLASH_ATTN: on_cpu or not stand_ins.has_flash_attn(),
            "lora": Flags(self.openrlhf).value("--ds.lora.rank") not in (None, "0"),
        }
        return (patches.TRAINING, *(name for name, holds in of_hardware.items() if holds), *self.conditions)

    def flags(self) -> dict[str, Any]:
        """The run as flags without dashes, as a file of ``--config`` has them; its folder and its log stay out."""
        # Without a perturbation too: a replay buffer is refused where no perturbation is named, and "none" is a name.
        lines: dict[str, Any] = {"perturbation": "none"}
        for name, spec in self.specs.items():
            root = KINDS[name].flag.removeprefix("--")
            for key, value in spec.items():
                lines[root if key == "name" else f"{root}.{key}"] = _value(value)
        for name, value in self.sampling.given().items():
            lines[f"sampling.{name}"] = _value(value)
        for flag, entry in SETTINGS.items():
            value = getattr(self, entry.name)
            if value != entry.default and flag not in ("--run-dir", "--log-file"):
                lines[flag.removeprefix("--")] = _value(value)
        for openrlhf_flag in Flags(self.openrlhf):
            lines[openrlhf_flag.name.removeprefix("--")] = shlex.join(openrlhf_flag.values) or True
        return lines

    def write(self, path: Path) -> None:
        """Writes the file that repeats the run; a user's own class is included with its source."""
        import yaml

        text = yaml.safe_dump(self.flags(), sort_keys=False, allow_unicode=True, width=1 << 30)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, f"# Repeats this run: ngrpo train --config {path.name}\n{text}")

    def __getstate__(self) -> dict[str, Any]:
        """Pickles the specs and not the extensions: each process makes them itself, also of a user's own class."""
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}


def _value(value: object) -> Any:
    """A value as a line of a run's file has it: text is quoted, because a file's text is read as a shell reads it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return shlex.quote(value) if isinstance(value, str) else value


SETTINGS = {entry.metadata["flag"]: entry for entry in dataclasses.fields(RunConfig) if entry.metadata}
"""The settings by their flags, in the order of the file."""
_current = RunConfig()


def begin(run: RunConfig) -> None:
    """Makes a run the one of this process."""
    global _current
    _current = run


def current_run() -> RunConfig:
    """The run that this process belongs to; the defaults where none has begun."""
    return _current
