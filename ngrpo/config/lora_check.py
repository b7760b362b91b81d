# SPDX-License-Identifier: Apache-2.0
"""The names in ``--ds.lora.target_modules`` are compared with the modules of the run's model, before it is loaded."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from ngrpo.machine.models import architecture
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError

TARGET_MODULES = "--ds.lora.target_modules"
_EVERY_LINEAR = "all-linear"


def check_target_modules(flags: Flags, config_path: Path | None) -> None:
    """Raises ``UsageError`` for a name that no module of the model has.

    PEFT 0.21 fails over such names once the model is loaded if none of them matches a module. If another one does, it
    trains fewer adapters than were named, without a word.

    Args:
        flags: OpenRLHF's.
        config_path: the model's config.json; without one, nothing is compared.
    """
    named = [flag.values for flag in flags if flag.name == TARGET_MODULES]
    if not named or flags.or_default("--ds.lora.rank") == "0" or config_path is None:
        return
    targets = named[-1]
    if _EVERY_LINEAR in targets:
        raise UsageError(
            f"{TARGET_MODULES} {' '.join(targets)}: PEFT takes {_EVERY_LINEAR} for a module's name if the flag gives"
            " it. Leave the flag out: adapters on all linear layers but the head are its default."
        )
    modules = architecture.adaptable_modules(config_path)
    if modules is None:
        return
    unknown = [target for target in targets if not _matches(target, modules)]
    if not unknown:
        return
    allowed = list(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    close = [match for target in unknown for match in get_close_matches(target, allowed, n=1)]
    hint = f" Did you mean {' '.join(close)}?" if close else ""
    raise UsageError(
        f"{TARGET_MODULES} {' '.join(unknown)}: the model has no such module that can get an adapter.{hint} Give some"
        f" of {', '.join(allowed)}, or leave the flag out for all linear layers but the head."
    )


def _matches(target: str, modules: Sequence[str]) -> bool:
    """Whether PEFT finds a module for a name: the module's whole name, or the end of it after a dot."""
    return any(module == target or module.endswith(f".{target}") for module in modules)
