# SPDX-License-Identifier: Apache-2.0
"""Checks of the reward model and of the critic: their weights, the reward head, and that they read the policy's ids.

OpenRLHF 0.11.2 loads both with `get_llm_for_sequence_regression`, which initialises at random what the files lack. A
critic may begin with a random head, which is trained; a reward model may not, for its head is all that is trained on.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ngrpo.config import input_checks
from ngrpo.config.complete_run import CompleteRun
from ngrpo.config.feature_kinds import ESTIMATOR, MODEL
from ngrpo.config.run import RunConfig
from ngrpo.machine.models import adapters, architecture, conversation, packaged, token_ids
from ngrpo.machine.models.token_ids import Comparison
from ngrpo.machine.models.weight_files import tensor_shapes, weight_files
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.machine.upstream.types import PreTrainedTokenizerBase
from perturbations.errors import UsageError, nearest

REWARD = "--reward.model_name_or_path"
CRITIC = "--critic.model_name_or_path"
HEAD = "--ds.value_head_prefix"
_SERVED = (
    "Give one with this tokenizer, or serve it (python -m openrlhf.cli.serve_rm) and let it read texts:"
    " --reward.remote_url http://HOST:PORT/get_reward."
)
_FIXES = {REWARD: _SERVED, CRITIC: "Give one with this tokenizer, or leave the flag out."}
_HEAD_WORDS = ("score", "value", "reward", "head", "classifier", "regression", "linear", "summary")


@dataclass(frozen=True)
class Local:
    """A reward model or critic whose folder is here.

    Attributes:
        flag: that names it.
        name: as the flag has it.
    """

    flag: str
    name: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.flag} {self.name}"


# --- the rule and the warning -----------------------------------------------------------------------


def check(complete: CompleteRun) -> str | None:
    """Raises ``UsageError`` for a local reward model or critic that cannot judge the policy's responses.

    Returns:
        What was not checked of them, or None.
    """
    reasons: list[str | None] = []
    for flag, name in _named(complete.flags):
        _check_whole(flag, name)
        local = find_local(flag, name)
        if local is None:
            reasons.append(
                f"not checked: {flag} {name}, which is not here. One that does not fit ends the run once it has loaded."
            )
        else:
            reasons.append(_check_weights(local, complete))
            reasons.append(check_tokens(local, complete.flags, complete.run))
    return " ".join(reason for reason in reasons if reason is not None) or None


def _check_weights(local: Local, complete: CompleteRun) -> str | None:
    """Raises ``UsageError`` for a folder without weights, and for a reward model without its head.

    Returns why it could not look, or None. A run that is only planned needs no weights, and neither does a model of the
    hub, of which the cache may have the config.json alone.
    """
    if weight_files(local.folder, subject=str(local)):
        if local.flag == REWARD:
            check_head(local.folder, complete.flags, subject=str(local))
        return None
    if complete.run.machine is None and local.folder == _path(local.name):
        raise UsageError(f"{local}: the folder has no weights (*.safetensors). Download the whole model.")
    return f"not checked: {local} has no weights here, which a run needs."


def notes(complete: CompleteRun) -> Iterator[str]:
    """Warnings about special tokens of the policy that a reward model or critic reads as other ones."""
    for flag, name in _named(complete.flags):
        local = find_local(flag, name)
        policy_config = architecture.find_config(input_checks.name_of(complete.flags))
        if local is None or policy_config is None:
            continue
        policy = _tokenizer(policy_config.parent)
        compared = None if policy is None else _compared(policy, local.folder, complete.flags, complete.run)
        if compared is not None and compared.rarely_wrong and not compared.wrong:
            yield (
                f"{local}: its tokenizer has {len(compared.rarely_wrong)} of the model's special tokens otherwise:"
                f" {compared.rarely_wrong[0]}. A response that has one is judged by another token."
            )


def _named(flags: Flags) -> Iterator[tuple[str, str]]:
    """The flags of the reward model and of the critic that OpenRLHF loads, each with its model.

    A critic without a flag of its own begins as the reward model, or else as the policy.
    """
    reward = None
    if not flags.value("--reward.remote_url") and not flags.value("--train.agent_func_path"):
        reward = flags.value(REWARD)
    if reward:
        yield REWARD, reward
    critic = flags.value(CRITIC)
    if critic and critic not in (reward, flags.value(MODEL)) and flags.or_default(ESTIMATOR) == "gae":
        yield CRITIC, critic


def _path(name: str) -> Path:
    return packaged.folder_of(name) if name in packaged.PACKAGED else Path(name).expanduser()


def _check_whole(flag: str, name: str) -> None:
    """Raises ``UsageError`` for a folder with a LoRA adapter, with which OpenRLHF ends after its models have loaded.

    It reads the type of the model from a config.json, which PEFT does not write. Where there is one, transformers loads
    the adapter's base model, and leaves its head random.
    """
    if not (_path(name) / adapters.CONFIG).is_file():
        return
    if flag == CRITIC:
        fix = f"Merge it with its base model (ngrpo model merge {name} FOLDER), and give FOLDER."
    else:
        merged = "AutoPeftModelForSequenceClassification.from_pretrained(ADAPTER, num_labels=1).merge_and_unload()"
        fix = (
            f"Merge it with its base model: peft.{merged}.save_pretrained(FOLDER), where the base or the adapter"
            " (modules_to_save) has the head. Save the tokenizer there too, and give FOLDER."
        )
    raise UsageError(
        f"{flag} {name}: has a LoRA adapter ({adapters.CONFIG}), and OpenRLHF 0.11.2 loads whole models here. {fix}"
    )


def find_local(flag: str, name: str) -> Local | None:
    """The model with its folder, in the hub's cache too; None for one that is not here, or not made yet."""
    config_path = architecture.find_config(name)
    if config_path is None:
        return None
    return Local(flag, name, config_path.parent)


# --- the head ---------------------------------------------------------------------------------------


def check_head(folder: Path, flags: Flags, *, subject: str) -> None:
    """Raises ``UsageError`` for a reward model whose files have no head of the name that OpenRLHF reads.

    Of files that only loading tells the tensors of, `trainers/openrlhf/reward_model.py` checks what was loaded.
    """
    shapes = tensor_shapes(folder)
    if shapes is None:
        return
    config = architecture.read_config(folder / "config.json")
    head = str(config.get("value_head_prefix", flags.or_default(HEAD)))
    for name, shape in shapes.items():
        # transformers also loads a tensor whose name has the prefix of the base model: model.score.weight.
        if name == f"{head}.weight" or (name.endswith(f".{head}.weight") and name.count(".") == head.count(".") + 2):
            if shape is not None and shape[:1] != (1,):
                raise UsageError(
                    f"{subject}: its head {name} has {shape[0]} outputs, and a reward is one number. Give a reward"
                    " model with one output (num_labels=1)."
                )
            return
    raise UsageError(f"{subject}: {no_head(head, shapes, in_config='value_head_prefix' in config)}")


def no_head(head: str, shapes: Mapping[str, tuple[int, ...] | None], *, in_config: bool) -> str:
    """The message about a reward model without a head of this name: what may be meant among its tensors, and the fix.

    Args:
        head: the name that OpenRLHF reads.
        shapes: the shapes of the model's tensors, by their names; empty where they are not known.
        in_config: whether the name is of the model's config.json, which OpenRLHF prefers to its flag.
    """
    source = "value_head_prefix of its config.json" if in_config else f"{HEAD} {head}"
    alike = [name for name, shape in shapes.items() if _is_like_a_head(name, shape)]
    problem = f"its files have no tensor {head}.weight ({source}), so its rewards would be those of a random head."
    usable = [name.removesuffix(".weight") for name in alike if name.count(".") == 1 and name.endswith(".weight")]
    if usable:
        heads = ", ".join(f"{name}.weight" for name in usable)
        fix = f"Give {HEAD} with the name of its head"
        if in_config:
            fix = "Correct the config.json, which OpenRLHF prefers to the flag"
        return f"{problem} It has {heads}.{nearest(head, usable)} {fix}: {usable[0]}."
    if alike:
        return (
            f"{problem} What is like one: {', '.join(sorted(alike))}. OpenRLHF reads one matrix without a dot in its"
            f" name: save it as {head}.weight."
        )
    other = " It has no head of another name either." if shapes else ""
    return f"{problem}{other} Give a reward model, such as openrlhf.cli.train_rm saves; a plain language model is none."


def _is_like_a_head(name: str, shape: tuple[int, ...] | None) -> bool:
    """Whether a tensor may be a head's: by its one output, or by words of its name outside layers."""
    if shape is not None and len(shape) == 2:
        return shape[0] == 1
    parts = name.split(".")
    is_in_layer = any(part.isdigit() for part in parts)
    return not is_in_layer and "lm_head" not in parts and any(word in name for word in _HEAD_WORDS)


# --- the tokens -------------------------------------------------------------------------------------


def check_tokens(local: Local, flags: Flags, run: RunConfig) -> str | None:
    """Raises ``UsageError`` for a model that reads the policy's ids as other tokens; returns why it did not look."""
    policy_config = architecture.find_config(input_checks.name_of(flags))
    if policy_config is None:
        return f"not checked: whether {local} reads the model's tokens, for the model is not here."
    policy_folder = policy_config.parent
    if policy_folder.resolve() == local.folder.resolve():
        return None
    policy = _tokenizer(policy_folder)
    if policy is None:
        return f"not checked: whether {local} reads the model's tokens, for the model's tokenizer cannot be used."
    rows = token_ids.rows_of(architecture.read_config(local.folder / "config.json"))
    own_rows = token_ids.rows_of(architecture.read_config(policy_config))
    largest = token_ids.largest_id(policy, own_rows)
    if rows is not None and largest >= rows:
        raise UsageError(
            f"{local}: OpenRLHF hands it the token ids of {flags.value(MODEL)}, up to {largest}, and it has embeddings"
            f" of {rows} tokens. {_FIXES[local.flag]}"
        )
    compared = _compared(policy, local.folder, flags, run)
    if compared is None:
        return f"not checked: whether {local} reads the model's tokens, for it has no tokenizer that can be used."
    if compared.wrong:
        raise UsageError(
            f"{local}: OpenRLHF hands it the token ids of {flags.value(MODEL)}, and its own tokenizer has"
            f" {len(compared.wrong)} of these {compared.size} tokens otherwise: {compared.wrong[0]}."
            f" {_FIXES[local.flag]}"
        )
    return None


def _compared(policy: PreTrainedTokenizerBase, folder: Path, flags: Flags, run: RunConfig) -> Comparison | None:
    """The comparison of a model's tokenizer with the policy's; None where it has none that can be used."""
    other = _tokenizer(folder)
    if other is None:
        return None
    used = {policy.eos_token_id}
    with suppress(Exception):  # of any template: `check_template` reports it
        if flags.has(input_checks.TEMPLATE):
            arguments = conversation.template_arguments(run.chat_template_kwargs)
            text = conversation.rendered(policy, "x", arguments)
            used.update(policy(text, add_special_tokens=False)["input_ids"])
    return token_ids.compare(policy, other, used)


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder; None where there is none, or none that can be used."""
    # transformers makes an empty tokenizer of a folder without one.
    if not input_checks.has_tokenizer(folder):
        return None
    with suppress(Exception):  # of any library: OpenRLHF loads the policy's again, and none of a reward model
        return input_checks.tokenizer_in(folder)
    return None
