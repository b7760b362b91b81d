# SPDX-License-Identifier: Apache-2.0
"""All rules about a run, in one table for a start, a dry run and every arm of a comparison."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ngrpo import patches
from ngrpo.config import (
    batch_checks,
    compatibility,
    complete_run,
    datasources,
    flag_checks,
    input_checks,
    reward_and_critic,
    stretches,
)
from ngrpo.config.complete_run import CompleteRun
from ngrpo.config.feature_kinds import ESTIMATOR, MODEL, Combination
from ngrpo.config.run import RunConfig
from ngrpo.machine.hardware import gpu_plan, host_plan, stand_ins, surroundings
from ngrpo.machine.models import architecture, experts
from ngrpo.machine.upstream import patch_check, placement, versions
from ngrpo.machine.upstream.openrlhf_flags import DATASETS, MODEL_NAMES
from ngrpo.methods.scoring import reward_files

Stage = Literal["start", "data", "model"]
"""Stages of a start: before its task's files exist, when they exist, and when the model is in a local folder."""


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        stage: when a start checks it.
        about: its line in a dry run.
        check: raises ``UsageError`` for a run that breaks it; returns why it could not look, or None.
    """

    stage: Stage
    about: str | Callable[[CompleteRun], str]
    check: Callable[[CompleteRun], str | None]

    def line(self, complete: CompleteRun) -> str:
        """Its line in a dry run of this run."""
        return self.about if isinstance(self.about, str) else self.about(complete)


# --- checks that need more than one of a run's parts ------------------------------------------------


def check_hardware(complete: CompleteRun) -> str | None:
    """The profile's own check, and what cannot be used with it or without flash-attn."""
    profile = complete.run.profile
    combination = Combination(
        run=complete.run, flags=complete.flags, hardware=profile.name, missing=stand_ins.missing()
    )
    compatibility.check(compatibility.HARDWARE, combination)
    return profile.check(complete.flags)


def check_parsed(complete: CompleteRun) -> None:
    """Raises ``UsageError`` for flags that OpenRLHF's parser would refuse, or that it accepts and then fails over."""
    flags = complete.flags
    # OpenRLHF copies the reward model's name for its critic, and fails without a message where there is no reward.
    if flags.or_default(ESTIMATOR) == "gae" and not flags.value("--critic.model_name_or_path"):
        reward_files.check_any(flags)
    _ = complete.args  # parses the flags


def about_gpus(complete: CompleteRun) -> str:
    """The number of GPUs that a run needs, and the GPUs of its machine."""
    if complete.machine is None:
        return "no GPU is needed"
    needed = sum(group.gpus for group in placement.groups(complete.args))
    return f"GPUs: {needed} needed; {complete.machine}"


def check_patches(complete: CompleteRun) -> None:
    """Checks the patches of the training, and vLLM's where the run needs what OpenRLHF lacks."""
    run = complete.to_run()  # flags of the layers need patches too
    conditions = run.training_conditions
    if run.conditions:
        conditions = (*conditions, *patches.VLLM_CONDITIONS)
    patch_check.check(patches.active(conditions))


def check_support(complete: CompleteRun) -> str | None:
    """Raises ``UsageError`` for a model that the run cannot use; returns why its config.json was not read."""
    run = complete.run
    model = input_checks.name_of(complete.flags)
    path = architecture.find_config(model)
    if path is not None:
        experts.check(path, replayed=run.replay_routing)
    longest = int(complete.flags.or_default("--data.max_len"))
    if run.second_round is not None:
        longest += run.second_round.room
    return architecture.check_perturbed(model, run.spec, longest)


def check_data(complete: CompleteRun) -> str | None:
    """Checks the dataset and where rewards come from; returns why not all rows were looked at."""
    run, flags = complete.run, complete.flags
    dataset = "--data.prompt_dataset"
    if run.task is not None and flags.value(dataset) == complete_run.UNPREPARED[dataset]:
        complete_run.prepare_task(run.task)  # raises again what has kept it from being prepared
    input_checks.check_files(flags)
    datasources.check(flags)
    reward_files.check_rewards(flags)
    unchecked = []
    for name in DATASETS:
        value = flags.value(name)
        if value and not input_checks.is_checked(name, value):
            unchecked.append(f"{name} {value}")
    if not unchecked:
        return None
    return (
        f"not checked: the rows of {' and '.join(unchecked)}. OpenRLHF loads what is no file from a folder or the hub,"
        " and a row that cannot be used ends the run then."
    )


def check_servers(complete: CompleteRun) -> str | None:
    """Raises ``UsageError`` where a reward server does not run; returns why a run that is only planned asks none."""
    rewards = (complete.flags.value("--reward.remote_url") or "").split(",")
    addresses = [reward for reward in rewards if reward.startswith("http")]
    if complete.run.machine is not None and addresses:  # the run is only planned
        return f"not checked: whether a reward server runs at {', '.join(addresses)}."
    for address in addresses:
        reward_files.check_server(address)
    return None


# --- the table --------------------------------------------------------------------------------------

RULES = (
    Rule(
        "start",
        lambda _: f"OpenRLHF {versions.OPENRLHF} and vLLM {versions.installed_vllm()} are there",
        lambda _: versions.check_stack(),
    ),
    Rule("start", lambda complete: f"hardware {complete.run.profile.name} can do it", check_hardware),
    Rule("start", "caches, sockets and the working directory can be used", lambda _: surroundings.check()),
    Rule("start", "OpenRLHF's parser and its conditions accept the flags", check_parsed),
    Rule(
        "start",
        "engines and models that share GPUs agree",
        lambda complete: gpu_plan.check(complete.args),
    ),
    Rule(
        "start",
        about_gpus,
        lambda complete: gpu_plan.check_machine(complete.args, complete.machine),
    ),
    Rule(
        "start",
        "the batches divide over the ranks",
        lambda complete: batch_checks.check_batches(complete.args),
    ),
    Rule("start", "the upstream patches match the installed packages", check_patches),
    Rule(
        "start",
        lambda complete: flag_checks.about_start(complete.flags),
        lambda complete: flag_checks.check_checkpoint(complete.flags),
    ),
    Rule("start", "a resumed run has its model and its methods", stretches.check),
    Rule(
        "start",
        lambda complete: f"{complete.run.run_dir} can be written",
        lambda complete: flag_checks.check_output(complete.flags, complete.run),
    ),
    Rule(
        "start",
        lambda complete: host_plan.about_checkpoints(complete.args),
        lambda complete: host_plan.check_disk(complete.args, complete.machine),
    ),
    Rule(
        "start",
        lambda complete: host_plan.about_memory(complete.args, complete.machine),
        lambda complete: host_plan.check_memory(complete.args, complete.machine),
    ),
    Rule(
        "start",
        "shared memory for several ranks",
        lambda complete: host_plan.check_shared_memory(complete.args, complete.machine),
    ),
    Rule("data", "dataset and reward", check_data),
    Rule("data", "reward servers answer", check_servers),
    Rule("data", "rows for a step", lambda complete: batch_checks.check_rows(complete.flags)),
    Rule(
        "data",
        "evaluation",
        lambda complete: flag_checks.check_evaluated(complete.flags, complete.run),
    ),
    Rule(
        "model",
        lambda complete: architecture.in_words(input_checks.name_of(complete.flags)),
        check_support,
    ),
    Rule(
        "model",
        "the model's files and context",
        lambda complete: input_checks.check_folder(complete.flags, complete.run),
    ),
    Rule("model", "reward model and critic", reward_and_critic.check),
    Rule(
        "model",
        "the prompts can be rendered",
        lambda complete: input_checks.check_template(complete.flags, complete.run),
    ),
    Rule(
        "model",
        lambda complete: f"the options fit the model {complete.flags.value(MODEL) or ''}",
        lambda complete: input_checks.check_options(complete.flags, complete.run),
    ),
)


def check(stage: Stage, complete: CompleteRun) -> list[str]:
    """Raises ``UsageError`` for the first rule of a stage that a run breaks; returns what was not checked, and why."""
    reasons = [rule.check(complete) for rule in RULES if rule.stage == stage]
    return [reason for reason in reasons if reason is not None]


def dry_run_checks(complete: CompleteRun) -> list[tuple[str, Callable[[], str | None]]]:
    """The line of each rule in a dry run, and its check."""
    return [(rule.line(complete), partial(rule.check, complete)) for rule in RULES]


def started(run: RunConfig) -> CompleteRun:
    """The complete run of a start, with the rules of its first stage checked before its task's files are written."""
    return complete_run.make(run, before_machine=ask_hub_for_sizes, before_task=partial(check, "start"))


def ask_hub_for_sizes(complete: CompleteRun) -> None:
    """Loads the config.json of each model that is not here from the hub: the placement on GPUs depends on their sizes.

    Raises:
        UsageError: for a model that the hub does not have.
    """
    if complete.run.profile.name == "cpu" or complete.flags.has("--use_ms"):  # ModelScope has models of its own
        return
    for flag in complete.flags:
        if flag.name.endswith(MODEL_NAMES) and flag.values:
            architecture.ask_hub_for_size(flag.values[0])


def checked(run: RunConfig) -> CompleteRun:
    """The complete run after the rules of all stages, without a start.

    Raises:
        UsageError: for the first rule that it breaks.
    """
    complete = started(run)
    check("data", complete)
    check("model", complete)
    return complete
