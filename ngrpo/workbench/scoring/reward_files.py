# SPDX-License-Identifier: Apache-2.0
"""Where rewards come from, checked before a start: users' Python files, which are not run, and scorers by name."""

from __future__ import annotations

import symtable
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError
from perturbations.options import nearest

BUILT_IN = ("math", "choice", "reasoning_gym")
OF_TASK = "task:"
_REWARD_FUNC = "reward_func(queries, prompts, labels)"
_FILE, _AGENT, _MODEL = "--reward.remote_url", "--train.agent_func_path", "--reward.model_name_or_path"


def check_any(args: Sequence[str]) -> None:
    """Raises ``UsageError`` for flags that name no reward at all."""
    if not any(Flags(args).value(flag) for flag in (_FILE, _AGENT, _MODEL)):
        raise UsageError(
            f"no reward: give --task NAME, {_FILE} with a Python file that has reward_func, or {_MODEL} with a reward"
            " model."
        )


def check_rewards(args: Sequence[str]) -> None:
    """Raises ``UsageError`` for flags without a reward, or a file that lacks the function or class of OpenRLHF."""
    check_any(args)
    reward, agent = (Flags(args).value(flag) for flag in (_FILE, _AGENT))
    parts = reward.split(",") if reward else []
    if len(parts) > 1 and any(part.endswith(".py") for part in parts):
        raise UsageError(
            f"{_FILE} {reward}: OpenRLHF 0.11.2 reads one Python file alone, {parts[0]}. Give one, whose reward_func"
            " calls the others."
        )
    for part in parts:
        if part.endswith(".py"):
            _check_python(_FILE, part, _REWARD_FUNC)
        elif not part.startswith(("http://", "https://")):
            raise UsageError(f"{_FILE} {part}: must be a Python file, or an address that begins with http.")
    if agent:
        _check_python(_AGENT, agent, "AgentExecutor()")


def check_scorer_name(name: str) -> None:
    """Raises ``UsageError`` for an unknown scorer or a missing file, with the nearest match.

    A task's scorer is accepted here; :func:`ngrpo.workbench.evaluate.scorers.check_scorer` looks at its name too.
    """
    if name.endswith(".py"):
        path = Path(name).expanduser()
        if not path.is_file():
            near = nearest(path.name, [p.name for p in path.parent.glob("*.py")])
            raise UsageError(f"scorer {name!r}: there is no such file.{near} Give an existing Python file.")
        _check_python("scorer", str(path), _REWARD_FUNC)
    elif name not in BUILT_IN and not name.startswith(OF_TASK):
        raise UsageError(
            f"unknown scorer {name!r}.{nearest(name, BUILT_IN)} Scorers: {', '.join(BUILT_IN)}, task:NAME, or a Python"
            f" file with OpenRLHF's {_REWARD_FUNC}."
        )


def _check_python(flag: str, path: str, needed: str) -> None:
    """Raises ``UsageError`` unless the file that ``flag`` names is Python and defines ``needed`` at its top."""
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
