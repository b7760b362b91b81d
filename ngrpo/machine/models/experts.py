# SPDX-License-Identifier: Apache-2.0
"""Whether a mixture of experts can be made and its routing replayed, by its config.json."""

from collections.abc import Mapping
from pathlib import Path

from ngrpo.machine.models import architecture
from perturbations.errors import UsageError
from perturbations.replay import routing

_CHOSEN = "num_experts_per_tok"


def check(path: Path, *, replayed: bool) -> None:
    """Raises ``UsageError`` for more chosen experts than there are, and for routers that a replay does not know.

    Args:
        path: the model's config.json.
        replayed: whether the run replays the routing.
    """
    config = architecture.read_config(path)
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config
    chosen = text.get(_CHOSEN)
    for name in architecture.EXPERT_COUNTS:
        number = text.get(name)
        if isinstance(chosen, int) and isinstance(number, int) and chosen > number > 0:
            raise UsageError(
                f"{path}: {_CHOSEN} {chosen} is more than {name} {number}: no token can be sent to {chosen}"
                f" experts. Give at most {number}."
            )
    if not replayed or config.get("auto_map"):
        return
    try:
        model = architecture.on_meta(config)
    except Exception:  # of any type's own class; loading the model reports it
        return
    routing.routers(model)
