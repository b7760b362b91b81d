# SPDX-License-Identifier: Apache-2.0
"""What a run with a second round cannot go with."""

from __future__ import annotations

from typing import NoReturn

from ngrpo.config.run import RunConfig
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.machine.upstream.openrlhf_parser import defaults
from perturbations.errors import UsageError

_ANSWERS = "--rollout.n_samples_per_prompt"


def check_second_round(flags: Flags, run: RunConfig) -> None:
    """Raises ``UsageError`` for flags under which a second round would be trained wrongly, or could not be asked."""
    method = run.second_round
    if method is None:
        return
    subject = f"--second_round {method.name}"

    def refuse(flag: str, reason: str, fix: str = "Leave one of them out.") -> NoReturn:
        raise UsageError(f"{flag} cannot be used with {subject}: {reason}. {fix}")

    if run.perturbation is not None and run.perturbation.active:
        inputs = "its records are of another prompt than the one that is trained"
        refuse(f"--perturbation {run.perturbation.name}", inputs)
    if run.sampling.correct_mask:
        refuse("--sampling.correct_mask", "its records are of another prompt than the one that is trained")
    if flags.value("--train.agent_func_path"):
        refuse("--train.agent_func_path", "an agent's first prompt is not all that it is told")
    if (flags.value("--data.max_images_per_prompt") or "0") != "0":
        refuse("--data.max_images_per_prompt", "pictures stand in the prompt that would be changed")
    if not (flags.value("--reward.remote_url") or run.task):
        raise UsageError(
            f"{subject} needs to know in the rollout which answers are right: give --reward.remote_url FILE.py, or a"
            " --task. A reward model comes too late."
        )
    if flags.value("--actor.policy_loss_type") == "gspo":
        refuse("--actor.policy_loss_type gspo", "its ratio is of a whole answer, the method's of each token")
    if run.credit is not None and run.credit.acts_in_loss:
        refuse(f"--credit {run.credit.name}", "both change the ratio of the same tokens")
    size = flags.value(_ANSWERS) or defaults()[_ANSWERS]
    if size == "1":
        refuse(f"{_ANSWERS} 1", "one answer of a group stays, and right ones take the place of others", "Set it to 8.")
    if method.group == "all":
        _check_advantage(run, subject)


def _check_advantage(run: RunConfig, subject: str) -> None:
    """Raises ``UsageError`` where the advantages cannot be of all answers of both rounds."""
    fix = "or --second_round.group kept, which takes the rewards of the answers that are trained alone."
    advantage = run.advantage
    if advantage is None:
        raise UsageError(
            f"{subject} takes advantages of the answers of both rounds, which OpenRLHF's own estimators do not know."
            f" Add --advantage group_norm, {fix}"
        )
    if advantage.counted or advantage.leaves_out_overlong:
        raise UsageError(
            f"--advantage {advantage.name} looks at more of an answer than its reward, which is all that is kept of"
            f" those that {subject} draws and does not train. Choose another advantage, {fix}"
        )
