# SPDX-License-Identifier: Apache-2.0
"""A user's single Python file, also in processes on machines that do not have it.

The spec of a class carries the text of its file. Every process makes a module from the text. The hash of the text is in
the module's name, so that all processes have the same class.
"""

import ast
import base64
import binascii
import hashlib
import importlib.util
import inspect
import linecache
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

from perturbations.errors import SCALARS, UsageError, nearest

# The longest packed text. A spec may be one argument of a command (`--additional-config`), and Linux allows 128 KiB.
_LONGEST = 48 * 1024
_PREFIX = "perturbation_file_"
FIX_THAT_LINE = "Please fix that line."
"""How the message about a line of a user's file ends, unless the error has a better fix."""
_MAIN = ("__main__", "__mp_main__")  # a process that multiprocessing spawns imports the script as the latter


@dataclass(frozen=True)
class UserFile:
    """A file: its name without the folder, its text with newlines as ``\\n``, and the text compressed as ASCII."""

    filename: str
    text: str
    packed: str

    @property
    def module(self) -> str:
        """The module's name: a function of file name and text alone."""
        stem = re.sub(r"\W", "_", self.filename.removesuffix(".py"))
        return f"{_PREFIX}{stem}_{_hash(self.text)}"


_loaded: dict[str, UserFile] = {}


def split(address: str) -> tuple[str, str] | None:
    """``./damp.py:Damp`` as (``./damp.py``, ``Damp``), ``./damp.py`` with an empty name; None unless it is a file."""
    path, _, name = address.rpartition(":")
    if path.endswith(".py"):
        return path, name
    if address.endswith(".py"):
        return address, ""
    return None


def is_source(key: str) -> bool:
    """Whether a key of a spec is that of a file's packed text: ``source``, or ``gate.source``."""
    return key == "source" or key.endswith(".source")


def options_in_words(spec: Mapping[str, object]) -> list[str]:
    """The options of a spec, such as ``rate=0.1``, without its name and the texts of files."""
    return [f"{key}={value}" for key, value in spec.items() if key != "name" and not is_source(key)]


def digest(packed: str) -> str:
    """A short hash of the text in a packed one: releases of zlib pack the same text to different bytes."""
    return _hash(_unpack(packed, "source"))


def origin(module: str) -> UserFile | None:
    """The file of a module, if it is a user's or the running script's; None for an importable module."""
    if module in _MAIN:
        file = getattr(sys.modules.get(module) or sys.modules["__main__"], "__file__", None) or ""
        if not file.endswith(".py") or not Path(file).is_file():
            return None
        return _packed(Path(file).name, _decode(Path(file), file), file)
    return _loaded.get(module)


def from_file(path: str, label: str) -> ModuleType:
    """The module of a file, by its path (``~`` allowed); the same text is the same module.

    ``UsageError``, which begins with ``label``, where there is no such file, or it does not run.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        # A spec names a file without its folder; the file may have been loaded from the spec's text.
        loaded = next((source for source in _loaded.values() if source.filename == path), None)
        if loaded is not None:
            return sys.modules[loaded.module]
        raise UsageError(f"{label}: there is no file {path!r}{_why_missing(file)}")
    text = _decode(file, label)
    _refuse_siblings(text, file, label)
    return _module(_packed(file.name, text, label), str(file.resolve()), label)


def _why_missing(file: Path) -> str:
    """The end of the message that a file is missing: what is in its place."""
    folder = file.parent
    if not folder.is_dir():
        return f": there is no folder {str(folder)!r} either."
    if file.is_dir():
        return ": it is a folder. Name the Python file in it."
    names = sorted(path.name for path in folder.glob("*.py"))
    shown = names[:8]
    if len(names) > 8:
        shown.append("…")
    listing = ", ".join(shown) or "none"
    return f".{nearest(file.name, names)} Python files in {str(folder.resolve())!r}: {listing}."


def fault(error: BaseException) -> str | None:
    """An error that arose in a user's file or below it, with the file's line; None for one that did not."""
    innermost = _innermost(error)
    if innermost is None:
        return None
    path, filename, _ = innermost
    return _in_words(error, path, filename)


def line(error: BaseException) -> str:
    """Where an error arose in a user's file or below it, `` (line 24 of mine.py)``; empty for one that did not."""
    innermost = _innermost(error)
    if innermost is None:
        return ""
    _, filename, number = innermost
    return f" (line {number} of {filename})"


def _innermost(error: BaseException) -> tuple[str, str, int] | None:
    """The innermost line of a user's file in an error's traceback: path, the file's name and the line's number."""
    source_of_path = {getattr(sys.modules.get(name), "__file__", None): source for name, source in _loaded.items()}
    innermost_first = reversed(list(traceback.walk_tb(error.__traceback__)))
    for frame, number in innermost_first:
        path = frame.f_code.co_filename
        if path in source_of_path:
            return path, source_of_path[path].filename, number
    return None


def place(method: Callable[..., object]) -> str:
    """Where a user's file defines a method, `` (line 24 of mine.py)``; empty for a method of an importable module."""
    function = inspect.unwrap(getattr(method, "__func__", method))
    code = getattr(function, "__code__", None)
    source = origin(getattr(function, "__module__", ""))
    if code is None or source is None:
        return ""
    return f" (line {code.co_firstlineno} of {source.filename})"


def from_text(filename: str, packed: str, label: str) -> ModuleType:
    """The module of a text (:attr:`UserFile.packed`) in a spec; ``UsageError`` if damaged or failing."""
    filename = Path(filename).name
    source = UserFile(filename, _unpack(packed, label), packed)
    return _module(source, f"<{filename}, from the spec>", label)


def _module(source: UserFile, where: str, label: str) -> ModuleType:
    """The module of a file's text, run once in a process; ``where``: its path in tracebacks."""
    if source.module in sys.modules:
        return sys.modules[source.module]
    main = origin("__main__")
    if main is not None and (main.filename, main.text) == (source.filename, source.text):
        return sys.modules["__main__"]
    module = ModuleType(source.module)
    module.__file__ = where
    # Tracebacks quote the text from here on machines that do not have the file.
    lines = source.text.splitlines(keepends=True)
    linecache.cache[where] = (len(source.text), None, lines, where)
    sys.modules[source.module] = module
    _loaded[source.module] = source
    try:
        exec(compile(source.text, where, "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[source.module]
        del _loaded[source.module]
        raise UsageError(f"{label}: {_in_words(error, where, source.filename)}") from error
    return module


def _in_words(error: BaseException, where: str, filename: str) -> str:
    """An error in the user's file, with the file's line."""
    if isinstance(error, SyntaxError) and error.filename == where:
        line = (error.text or "").strip()
        return f"line {error.lineno} of {filename} is not Python: {error.msg}\n    {line}\n{FIX_THAT_LINE}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == where]
    place = filename
    quoted_line = ""
    if frames:
        innermost = frames[-1]
        place = f"line {innermost.lineno} of {filename}"
        if innermost.line:
            quoted_line = f"\n    {innermost.line}"
    # `dataclass` advises a default_factory for a list, but a command line cannot give an option that is a list.
    reason = str(error).replace("use default_factory", SCALARS)
    failure = f"{place} fails with {type(error).__name__}: {reason}{quoted_line}"
    if isinstance(error, ImportError):
        return (
            f"{failure}\nThe module that it imports must be installed in this Python, and on every node of a cluster."
        )
    if isinstance(error, SystemExit):
        return f'{failure}\nPut what is not a definition under `if __name__ == "__main__":`.'
    return f"{failure}\n{FIX_THAT_LINE}"


def _refuse_siblings(text: str, file: Path, label: str) -> None:
    """Raises ``UsageError`` for the import of a module next to the file: workers elsewhere lack it."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return  # reported with its line when the file is run
    fix = "Workers get this file alone: use one file, or a package installed on every node, named package.module:Name."
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            module = "." * node.level + (node.module or "")
            raise UsageError(f"{label}: line {node.lineno} of {file.name} imports {module!r} relative to itself. {fix}")
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            if _is_sibling(name.partition(".")[0], file.parent):
                raise UsageError(f"{label}: line {node.lineno} of {file.name} imports {name!r} from its folder. {fix}")


def _is_sibling(module: str, folder: Path) -> bool:
    """Whether a top-level module is in the folder, and is neither Python's nor of an installed package."""
    candidates = (folder / f"{module}.py", folder / module / "__init__.py")
    if not any(path.is_file() for path in candidates):
        return False
    if module in ("perturbations", "ngrpo") or module in sys.stdlib_module_names:
        return False
    return module not in packages_distributions()


def _decode(file: Path, label: str) -> str:
    try:
        return importlib.util.decode_source(file.read_bytes())
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise UsageError(f"{label}: {str(file)!r} cannot be read as Python text ({error}). Save it as UTF-8.") from None


def _packed(filename: str, text: str, label: str) -> UserFile:
    packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    if len(packed) > _LONGEST:
        raise UsageError(
            f"{label}: {filename} is too long for a spec ({len(packed):,} bytes compressed, at most {_LONGEST:,}):"
            " make it a package, installed on every node, and name it package.module:Name."
        )
    return UserFile(filename, text, packed)


def _unpack(packed: str, label: str) -> str:
    try:
        return zlib.decompress(base64.b64decode(packed, validate=True)).decode()
    except (binascii.Error, zlib.error, UnicodeDecodeError, TypeError, ValueError):
        raise UsageError(
            f"{label}: its 'source' is not the text of a file as spec() packs it."
            " Leave 'source' out where there is the file, or take the whole spec from spec()."
        ) from None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
