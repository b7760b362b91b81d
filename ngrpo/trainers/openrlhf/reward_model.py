# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's reward model: a weight that its files lack ends the run; transformers would leave it random."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ngrpo.config import reward_and_critic
from ngrpo.config.reward_and_critic import REWARD
from ngrpo.config.run import current_run
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
    """Raises ``UsageError`` for weights that were initialised at random, and a hub model that reads ids otherwise.

    A start has checked the tokens of a model in a folder (`ngrpo/config/reward_and_critic.py`).
    """
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
    if local is not None and not Path(name).expanduser().is_dir():
        run = current_run()
        reward_and_critic.check_tokens(local, Flags(run.openrlhf), run)
