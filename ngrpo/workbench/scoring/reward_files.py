# SPDX-License-Identifier: Apache-2.0
"""Reward functions and agents in a user's Python file: read and checked before anything starts, and not run."""

from __future__ import annotations

import symtable
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError
from perturbations.options import nearest

REWARD_FUNC = "reward_func(queries, prompts, labels)"
_FILE, _AGENT, _MODEL = "--reward.remote_url", "--train.agent_func_path", "--reward.model_name_or_path"


def check_any(args: Sequence[str]) -> None:
    """Raises ``UsageError`` for flags that name no reward at all."""
    if not any(Flags(args).value(flag) for flag in (_FILE, _AGENT, _MODEL)):
        raise UsageError(
            f"no reward: give --task NAME, {_FILE} with a Python file that has reward_func, or {_MODEL} with a reward"
            " model."
        )


def check_rewards(args: Sequence[str]) -> None:
    """Checks where rewards come from; a user's file is read and not run.

    Raises:
        UsageError: where there is no reward at all, or a file does not define what OpenRLHF takes from it.
    """
    check_any(args)
    reward, agent = (Flags(args).value(flag) for flag in (_FILE, _AGENT))
    for part in reward.split(",") if reward else ():
        if part.endswith(".py"):
            check_python(_FILE, part, REWARD_FUNC)
        elif not part.startswith(("http://", "https://")):
            raise UsageError(f"{_FILE} {part}: must be a Python file, or an address that begins with http.")
    if agent:
        check_python(_AGENT, agent, "AgentExecutor()")


def check_python(flag: str, path: str, needed: str) -> None:
    """Checks a user's Python file without running it.

    Args:
        flag: the flag that names it, for messages.
        path: the file.
        needed: what it must define at its top, as it is called.

    Raises:
        UsageError: where there is no such file, it is not Python, or does not define that.
    """
    try:
        text: Any = Path(path).read_bytes()  # bytes say their encoding; the stubs know text alone
        symbols = symtable.symtable(text, path, "exec").get_symbols()
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be read ({error.strerror}). Give an existing Python file.") from None
    except (SyntaxError, ValueError, RecursionError) as error:
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"{flag} {path}: is not Python ({where}). Correct it.") from None
    name = needed.partition("(")[0]
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    if name not in names and b"import *" not in text:
        raise UsageError(f"{flag} {path}: does not define {needed}.{nearest(name, names)} Name it so.")
