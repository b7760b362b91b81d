# SPDX-License-Identifier: Apache-2.0
"""The child process of process.py: holds one environment, tells its problems and scores answers, many at a time."""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from ngrpo.workbench.environments import Unfit
from ngrpo.workbench.environments.classic import ClassicEnvironment
from ngrpo.workbench.environments.tasksets import TasksetEnvironment

_LOADER = "load_environment"


def load(module_name: str, name: str) -> Any:
    """The environment of an installed module.

    Args:
        module_name: the module.
        name: the function in it that makes an environment, or its subclass of ``Taskset``; if empty,
            ``load_environment``, else the one taskset in its ``__all__``.

    Raises:
        Unfit: where there is none, or one that is not served.
    """
    module = import_module(module_name)
    if name and not hasattr(module, name):
        raise Unfit(f"the module {module_name} has no {name}")
    member = getattr(module, name or _LOADER, None)
    if member is None or inspect.isclass(member):
        return TasksetEnvironment(_taskset(module, member), module_name)
    return ClassicEnvironment(member)


def _taskset(module: ModuleType, named: type[Any] | None) -> type[Any]:
    try:
        from verifiers.v1 import Env, Harness, Taskset
    except ImportError:
        lacks = f"the module {module.__name__} has no function {_LOADER}"
        raise Unfit(f"{lacks}, and a Taskset needs verifiers 0.3 or 0.4") from None
    exported = [getattr(module, each, None) for each in getattr(module, "__all__", ())]
    classes = [each for each in exported if inspect.isclass(each)]
    if any(issubclass(each, (Env, Harness)) for each in classes):
        raise Unfit("it brings a harness or an environment of its own; plain tasksets are served")
    tasksets = [named] if named is not None else [each for each in classes if issubclass(each, Taskset)]
    if len(tasksets) != 1 or not issubclass(tasksets[0], Taskset):
        raise Unfit(f"the module {module.__name__} has neither a function {_LOADER} nor one Taskset in its __all__")
    return tasksets[0]


async def answer(environment: Any, parent: Connection) -> None:
    """Answers requests until the other end closes: for the problems, where there is no row, else for a score."""
    going: set[asyncio.Task[None]] = set()

    async def one(number: int, data: dict[str, Any] | None, text: str) -> None:
        try:
            reply = (number, environment.rows() if data is None else await environment.score(data, text), None)
        except Unfit as error:
            reply = (number, None, str(error))
        except Exception as error:
            reply = (number, None, f"{type(error).__name__}: {error}")
        parent.send(reply)

    with suppress(EOFError):
        while True:
            task = asyncio.create_task(one(*await asyncio.to_thread(parent.recv)))
            going.add(task)
            task.add_done_callback(going.discard)


def main(channel: int, module: str, name: str) -> None:
    """Says whether the environment could be loaded, and then answers requests.

    Args:
        channel: the file descriptor of a connection.
        module: as :func:`load` takes it.
        name: likewise.
    """
    parent = Connection(channel)
    try:
        environment = load(module, name)
    except Unfit as error:
        return parent.send(str(error))
    except BaseException as error:
        traceback.print_exc()
        return parent.send(f"{type(error).__name__}: {error}")
    parent.send(None)
    asyncio.run(answer(environment, parent))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
