# SPDX-License-Identifier: Apache-2.0
"""Where rewards come from, checked before a start: users' Python files, which are not run, and scorers by name."""

import ast
import re
import sys
from collections.abc import Iterator
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError, nearest

BUILT_IN = ("math", "choice", "reasoning_gym")
OF_TASK = "task:"
_REWARD_FUNC, _EXECUTOR = "reward_func(queries, prompts, labels)", "AgentExecutor()"
_FILE, _AGENT, _MODEL = "--reward.remote_url", "--train.agent_func_path", "--reward.model_name_or_path"
_LABELS = "--data.label_key"
_SERVER_SECONDS = 10.0
_NO_SERVER_BEHIND = (502, 503, 504)  # Bad Gateway, Service Unavailable, Gateway Timeout
_NO_LABELS = f"reward_func reads its labels, and each is an empty text. Add {_LABELS} with the column of answers."
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def check_any(flags: Flags) -> None:
    """Raises ``UsageError`` for flags that name no reward at all."""
    if not any(flags.value(name) for name in (_FILE, _AGENT, _MODEL)):
        raise UsageError(
            f"no reward: give --task NAME, {_FILE} with a Python file that has reward_func, or {_MODEL} with a reward"
            " model."
        )


def check_rewards(flags: Flags) -> None:
    """Raises ``UsageError`` for flags without a reward, or a file that lacks the function or class of OpenRLHF."""
    check_any(flags)
    reward, agent = (flags.value(name) for name in (_FILE, _AGENT))
    parts = reward.split(",") if reward else []
    if len(parts) > 1 and any(part.endswith(".py") for part in parts):
        raise UsageError(
            f"{_FILE} {reward}: OpenRLHF 0.11.2 reads one Python file alone, {parts[0]}. Give one with a"
            " reward_func that calls the others."
        )
    for part in parts:
        if part.endswith(".py"):
            if isinstance(_check_python(_FILE, part, _REWARD_FUNC), ast.ImportFrom) and not flags.value(_LABELS):
                raise UsageError(f"{_FILE} {part}: {_NO_LABELS}")
        elif not re.match("https?://[^/]", part):
            raise UsageError(f"{_FILE} {part}: must be a Python file, or an address such as http://localhost:5000.")
    if agent:
        _check_python(_AGENT, agent, _EXECUTOR)


def check_server(address: str) -> None:
    """Raises ``UsageError`` where no HTTP server answers a GET, or a gateway answers that none is behind it.

    Other answers are fine: most servers of rewards take a POST alone.
    """
    opener = build_opener(ProxyHandler({}))  # OpenRLHF 0.11.2 asks its servers past any proxy
    try:
        opener.open(address, timeout=_SERVER_SECONDS).close()
        return
    except HTTPError as error:
        if error.code not in _NO_SERVER_BEHIND:
            return
        answer = str(error)
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        answer = str(reason) or type(reason).__name__
    raise UsageError(
        f"{_FILE} {address}: no reward server answers there ({answer}). Start it before the run, or correct the"
        " address."
    )


def label_note(flags: Flags) -> str | None:
    """A warning about a user's reward function that has its labels in its text, where none are given to it."""
    part = flags.value(_FILE) or ""
    if flags.value(_LABELS) or not part.endswith(".py"):
        return None
    return f"{_FILE} {part}: {_NO_LABELS}" if _check_python(_FILE, part, _REWARD_FUNC) is not None else None


def check_scorer_name(name: str) -> None:
    """Raises ``UsageError`` for an unknown scorer or a missing file, with the nearest match.

    A task's scorer is accepted here; :func:`ngrpo.methods.tasks.check_scorer` looks at its name too.
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


def _check_python(flag: str, path: str, needed: str) -> ast.AST | None:
    """What reads labels in the file that ``flag`` names: the user's function, or the import of one of ours; else None.

    Raises:
        UsageError: for a file that is not Python, lacks ``needed`` or a module that it imports, or defines something
            that OpenRLHF cannot call.
    """
    subject, name = f"{flag} {path}", needed.partition("(")[0]
    try:
        source = Path(path).read_bytes()
        tree = ast.parse(source)
    except OSError as error:
        raise UsageError(f"{subject}: cannot be read ({error.strerror}). Give an existing Python file.") from None
    except (SyntaxError, ValueError, RecursionError) as error:
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"{subject}: is not Python ({where}). Correct it.") from None
    names: dict[str, ast.AST] = {}
    for node in _at_top(tree):
        if isinstance(node, Definition):
            names[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0]: node for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = node
    if name not in names and "*" not in names:
        raise UsageError(f"{subject}: does not define {needed}.{nearest(name, names)} Name it so.")
    folder = Path(path).resolve().parent
    for node in tree.body:  # an import below `try` or `if` may fail
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        for module in (each.partition(".")[0] for each in modules):
            beside = (folder / module).is_dir() or (folder / f"{module}.py").is_file()
            known = beside or module in sys.modules or find_spec(module) is not None
            if not known and b"sys.path" not in source:
                raise UsageError(
                    f"{subject}: line {node.lineno} imports {module!r}, which is neither installed nor in the file's"
                    " folder. Install it, or correct the name."
                )
    found = names.get(name)
    if isinstance(found, ast.ImportFrom):
        return found if (found.module or "").startswith("ngrpo.") else None  # where every reward reads them
    if not isinstance(found, Definition) or found.decorator_list:
        return None
    callable_with_three = False
    if isinstance(found, ast.FunctionDef):
        positional = len(found.args.posonlyargs) + len(found.args.args)
        enough = positional >= 3 or found.args.vararg is not None
        required = positional - len(found.args.defaults)
        callable_with_three = enough and required <= 3 and None not in found.args.kw_defaults
    if needed == _REWARD_FUNC and not callable_with_three:
        raise UsageError(
            f"{subject}: line {found.lineno}: OpenRLHF calls {name} with three lists and uses what it returns. Write:"
            f" def {needed}."
        )
    if needed == _EXECUTOR and not (isinstance(found, ast.ClassDef) and found.bases):
        raise UsageError(
            f"{subject}: line {found.lineno}: {name} must be a class that inherits from AgentExecutorBase."
        )
    third = [] if isinstance(found, ast.ClassDef) else [*found.args.posonlyargs, *found.args.args][2:3]
    reads = third and any(isinstance(node, ast.Name) and node.id == third[0].arg for node in ast.walk(found))
    return found if reads else None


def _at_top(node: ast.AST) -> Iterator[ast.AST]:
    """The statements outside functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, Definition | ast.Lambda):
            yield from _at_top(child)
