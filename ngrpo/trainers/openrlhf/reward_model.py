# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's reward model and critic, once they have loaded.

A weight that a reward model's files lack ends the run; transformers would leave it random. So do other tokens than the
policy's in a model of the hub, whose tokens a start cannot compare.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ngrpo.config import reward_and_critic
from ngrpo.config.reward_and_critic import CRITIC, REWARD
from ngrpo.config.run import current_run
from ngrpo.machine.models import packaged
from ngrpo.machine.models.weight_files import tensor_shapes
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.machine.upstream.patch import around
from perturbations.errors import UsageError


@around
def checked_reward_model(original: Callable[..., type], *args: object, **kwargs: object) -> type:
    """`_get_reward_model`, which makes the class of a reward model and of no critic: what it loads is checked."""
    model_class: Any = original(*args, **kwargs)
    load = model_class.from_pretrained

    def checked_load(name: str, *args: object, **kwargs: object) -> Any:
        model, loading = load(name, *args, output_loading_info=True, **kwargs)
        check_loaded(name, model, loading)
        return model

    model_class.from_pretrained = staticmethod(checked_load)
    return model_class


def check_loaded(name: str, model: Any, loading: dict[str, Any]) -> None:
    """Raises ``UsageError`` for weights that were initialised at random."""
    local = reward_and_critic.find_local(REWARD, name)
    missing = sorted(loading["missing_keys"])
    head = model.value_head_prefix
    if f"{head}.weight" in missing:
        # Under ZeRO-3 transformers does not say which tensors it left out.
        surplus = dict.fromkeys(loading["unexpected_keys"])
        shapes = surplus if local is None else tensor_shapes(local.folder) or surplus
        in_config = hasattr(model.config, "value_head_prefix")
        raise UsageError(f"{REWARD} {name}: {reward_and_critic.no_head(head, shapes, in_config=in_config)}")
    if missing:
        raise UsageError(
            f"{REWARD} {name}: its files lack {len(missing)} of its weights, such as {missing[0]}, and transformers"
            " has initialised them at random. Give a whole reward model."
        )


@around
def with_compared_tokens(original: Callable[..., object], name: str, model_type: str, **kwargs: object) -> object:
    """`get_llm_for_sequence_regression`, which loads a reward model or a critic."""
    model = original(name, model_type, **kwargs)
    check_tokens_of_hub(REWARD if model_type == "reward" else CRITIC, name)
    return model


def check_tokens_of_hub(flag: str, name: str) -> None:
    """Raises ``UsageError`` for a hub model that reads the policy's ids as other tokens; says what is not compared.

    A start has compared a model in a folder (`ngrpo/config/reward_and_critic.py`).
    """
    if Path(name).expanduser().is_dir():
        return
    with suppress(UsageError):  # a model may have no tokenizer, and the hub may be out of reach: that is said below
        packaged.load_tokenizer(name)  # OpenRLHF loads the weights alone
    local = reward_and_critic.find_local(flag, name)
    reason = f"not checked: whether {flag} {name} reads the model's tokens, for it is not in the hub's cache."
    if local is not None:
        run = current_run()
        reason = reward_and_critic.check_tokens(local, Flags(run.openrlhf), run) or ""
    if reason:
        print(f"ngrpo: warning: {reason}", file=sys.stderr, flush=True)
