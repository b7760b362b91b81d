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

from ngrpo.machine.storage.datafiles import imported
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError, nearest

BUILT_IN = ("math", "choice", "reasoning_gym")
OF_TASK = "task:"
_REWARD_FUNC = "reward_func(queries, prompts, labels)"
_EXECUTOR = "AgentExecutor()"
_FILE = "--reward.remote_url"
_AGENT = "--train.agent_func_path"
_MODEL = "--reward.model_name_or_path"
REWARDS = (_FILE, _MODEL, _AGENT)
"""The flags that name where rewards come from, of which a training takes one."""
_LABELS = "--data.label_key"
_SERVER_SECONDS = 10.0
_NO_SERVER_BEHIND = (502, 503, 504)  # Bad Gateway, Service Unavailable, Gateway Timeout
_NO_LABELS = f"reward_func reads its labels, and each is an empty text. Add {_LABELS} with the column of answers."
# What a return statement may have that is never a dictionary.
_NO_DICTIONARY = (ast.List, ast.ListComp, ast.Tuple, ast.Constant, ast.Compare)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def check_any(flags: Flags) -> None:
    """Raises ``UsageError`` for flags that name no reward at all."""
    if not any(flags.value(name) for name in REWARDS):
        raise UsageError(
            f"no reward: give --task NAME, {_FILE} with a Python file that has reward_func, or {_MODEL} with a reward"
            " model."
        )


def python_file(flags: Flags) -> str | None:
    """The user's file with the reward function; None where rewards come from elsewhere."""
    source = flags.value(_FILE) or ""
    return source if source.endswith(".py") else None


def check_rewards(flags: Flags) -> None:
    """Raises ``UsageError`` for flags without a reward, or a file that lacks the function or class of OpenRLHF."""
    check_any(flags)
    reward = flags.value(_FILE)
    sources = reward.split(",") if reward else []
    if len(sources) > 1 and any(source.endswith(".py") for source in sources):
        raise UsageError(
            f"{_FILE} {reward}: OpenRLHF 0.11.2 reads one Python file alone, {sources[0]}. Give one with a"
            " reward_func that calls the others."
        )
    for source in sources:
        if source.endswith(".py"):
            reader = _label_reader(_FILE, source, _REWARD_FUNC)
            if isinstance(reader, ast.ImportFrom) and not flags.value(_LABELS):
                raise UsageError(f"{_FILE} {source}: {_NO_LABELS}")
        elif not re.match("https?://[^/]", source):
            raise UsageError(f"{_FILE} {source}: must be a Python file, or an address such as http://localhost:5000.")
    agent = flags.value(_AGENT)
    if agent:
        _label_reader(_AGENT, agent, _EXECUTOR)


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
    source = python_file(flags)
    if flags.value(_LABELS) or source is None:
        return None
    if _label_reader(_FILE, source, _REWARD_FUNC) is None:
        return None
    return f"{_FILE} {source}: {_NO_LABELS}"


def check_scorer_name(name: str) -> None:
    """Raises ``UsageError`` for an unknown scorer or a missing file, with the nearest match.

    A task's scorer is accepted here; :func:`ngrpo.methods.tasks.check_scorer` looks at its name too.
    """
    if name.endswith(".py"):
        path = Path(name).expanduser()
        if not path.is_file():
            hint = nearest(path.name, [neighbor.name for neighbor in path.parent.glob("*.py")])
            raise UsageError(f"scorer {name!r}: there is no such file.{hint} Give an existing Python file.")
        _label_reader("scorer", str(path), _REWARD_FUNC)
    elif name not in BUILT_IN and not name.startswith(OF_TASK):
        raise UsageError(
            f"unknown scorer {name!r}.{nearest(name, BUILT_IN)} Scorers: {', '.join(BUILT_IN)}, task:NAME, or a Python"
            f" file with OpenRLHF's {_REWARD_FUNC}."
        )


def _label_reader(flag: str, path: str, needed: str) -> ast.AST | None:
    """What reads labels in a file, which is checked: the user's function, or the import of one of ours; else None.

    Args:
        flag: names the file.
        path: the file.
        needed: the function or class that OpenRLHF calls, with its arguments.

    Raises:
        UsageError: for a file that is not Python, lacks ``needed`` or a module that it imports, or defines something
            that OpenRLHF cannot call.
    """
    subject = f"{flag} {path}"
    file = Path(path)
    name = needed.partition("(")[0]
    source = _source(subject, file)
    tree = _parsed(subject, source)
    names = _names(tree)
    if name not in names and "*" not in names:
        raise UsageError(f"{subject}: does not define {needed}.{nearest(name, names)} Name it so.")
    if b"sys.path" not in source:  # a file that changes it may find modules that we do not
        _check_imports(subject, tree, file.resolve().parent)

    node = names.get(name)
    if isinstance(node, ast.ImportFrom):
        is_ours = (node.module or "").startswith("ngrpo.")
        return node if is_ours else None  # all rewards of ours read labels
    if not isinstance(node, Definition) or node.decorator_list:  # such as a name that is assigned: only a run tells
        return None
    _check_definition(subject, node, needed)
    return node if _reads_labels(node) else None


def _source(subject: str, file: Path) -> bytes:
    """The text of a user's file; ``UsageError``, with the nearest name, for one that cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        hint = ""
        if not file.exists():
            hint = nearest(file.name, [neighbor.name for neighbor in file.parent.glob("*.py")])
        raise UsageError(f"{subject}: cannot be read ({error.strerror}).{hint} Give an existing Python file.") from None


def _parsed(subject: str, source: bytes) -> ast.Module:
    """The tree of a user's file; ``UsageError`` for a text that is not Python."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"{subject}: is not Python ({where}). Correct it.") from None


def _check_definition(subject: str, node: Definition, needed: str) -> None:
    """Raises ``UsageError`` for a reward function, or an agent's class, that OpenRLHF cannot call."""
    name = needed.partition("(")[0]
    if needed == _REWARD_FUNC and isinstance(node, ast.AsyncFunctionDef):
        raise UsageError(
            f"{subject}: line {node.lineno}: {name} is async, and OpenRLHF does not await what it returns. Write it"
            f" without async: def {needed}."
        )
    if needed == _REWARD_FUNC and not _takes_three(node):
        raise UsageError(
            f"{subject}: line {node.lineno}: OpenRLHF calls {name} with three lists and uses what it returns. Write:"
            f" def {needed}."
        )
    if needed == _REWARD_FUNC and _never_returns_a_dictionary(node):
        raise UsageError(
            f"{subject}: line {node.lineno}: {name} returns no dictionary, and OpenRLHF reads the one number in its"
            " 'rewards' for each response. Write: return {'rewards': rewards}."
        )
    if needed == _EXECUTOR and not (isinstance(node, ast.ClassDef) and node.bases):
        raise UsageError(f"{subject}: line {node.lineno}: {name} must be a class that inherits from AgentExecutorBase.")


def _names(tree: ast.AST) -> dict[str, ast.AST]:
    """The names that a file defines, imports or assigns at its top, each with its node."""
    names: dict[str, ast.AST] = {}
    for node in _at_top(tree):
        if isinstance(node, Definition):
            names[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                names[(alias.asname or alias.name).partition(".")[0]] = node
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = node
    return names


def _check_imports(subject: str, tree: ast.Module, folder: Path) -> None:
    """Raises ``UsageError`` for an import that would fail; one below ``try`` or ``if`` may."""
    for node in tree.body:
        for package in imported(node):
            is_beside = (folder / package).is_dir() or (folder / f"{package}.py").is_file()
            if not is_beside and package not in sys.modules and find_spec(package) is None:
                raise UsageError(
                    f"{subject}: line {node.lineno} imports {package!r}, which is neither installed nor in the file's"
                    " folder. Install it, or correct the name."
                )


def _takes_three(node: Definition) -> bool:
    """Whether a definition is a function that can be called with three positional arguments."""
    if not isinstance(node, ast.FunctionDef):
        return False
    positional = len(node.args.posonlyargs) + len(node.args.args)
    required = positional - len(node.args.defaults)
    takes_enough = positional >= 3 or node.args.vararg is not None
    has_required_keyword = None in node.args.kw_defaults
    return takes_enough and required <= 3 and not has_required_keyword


def _never_returns_a_dictionary(function: ast.AST) -> bool:
    """Whether a function returns nothing, yields, or returns lists, tuples or constants alone, as TRL's rewards do."""
    own = list(_own_nodes(function))
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own):
        return True
    values = [node.value for node in own if isinstance(node, ast.Return)]
    raises = any(isinstance(node, ast.Raise) for node in own)
    return not (raises and not values) and all(value is None or isinstance(value, _NO_DICTIONARY) for value in values)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Definition | ast.Lambda):
            yield child
            yield from _own_nodes(child)


def _reads_labels(node: Definition) -> bool:
    """Whether a function uses its third argument."""
    if isinstance(node, ast.ClassDef):
        return False
    arguments = [*node.args.posonlyargs, *node.args.args]
    if len(arguments) < 3:
        return False
    labels = arguments[2].arg
    return any(isinstance(used, ast.Name) and used.id == labels for used in ast.walk(node))


def _at_top(node: ast.AST) -> Iterator[ast.AST]:
    """The statements outside functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, Definition | ast.Lambda):
            yield from _at_top(child)
