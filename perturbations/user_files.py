# SPDX-License-Identifier: Apache-2.0
"""A user's single Python file in other processes, which may not have it.

The spec carries its text, and every process makes a module of it, with the text's hash in the name: one class in all.
"""

import ast
import base64
import binascii
import hashlib
import importlib.util
import linecache
import re
import sys
import traceback
import zlib
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

from perturbations.errors import UsageError, nearest

# A spec may be one argument of a command (`--additional-config`), and Linux allows 128 KiB for one.
_LONGEST = 48 * 1024
_PREFIX = "perturbation_file_"
_MAIN = ("__main__", "__mp_main__")  # the latter: a script, imported again by a spawned process


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
    return (address, "") if address.endswith(".py") else None


def digest(packed: str) -> str:
    """A short hash of a packed text, whichever zlib packed it."""
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
        known = next((s for s in _loaded.values() if s.filename == path), None)
        if known is not None:  # its short name, as specs have it
            return sys.modules[known.module]
        folder, beside = file.parent, ": it is a folder. Name the Python file in it."
        if not folder.is_dir():
            beside = f": there is no folder {str(folder)!r} either."
        elif not file.is_dir():
            there = sorted(path.name for path in folder.glob("*.py"))
            listing = ", ".join(there[:8] + ["…"] * (len(there) > 8)) or "none"
            beside = f".{nearest(file.name, there)} Python files in {str(folder.resolve())!r}: {listing}."
        raise UsageError(f"{label}: there is no file {path!r}{beside}")
    text = _decode(file, label)
    _refuse_siblings(text, file, label)
    return _module(_packed(file.name, text, label), str(file.resolve()), label)


def fault(error: BaseException) -> str | None:
    """An error that arose in a user's file or below it, with the file's line; None for one that did not."""
    files = {getattr(sys.modules.get(name), "__file__", None): source for name, source in _loaded.items()}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        where = frame.f_code.co_filename
        if where in files:
            return _in_words(error, where, files[where].filename)
    return None


def from_text(filename: str, packed: str, label: str) -> ModuleType:
    """The module of a text (:attr:`UserFile.packed`) in a spec; ``UsageError`` if damaged or failing."""
    filename = Path(filename).name
    source = UserFile(filename, _unpack(packed, label), packed)
    return _module(source, f"<{filename}, from the spec>", label)


def _module(source: UserFile, where: str, label: str) -> ModuleType:
    if source.module in sys.modules:
        return sys.modules[source.module]
    main = origin("__main__")
    if main is not None and (main.filename, main.text) == (source.filename, source.text):
        return sys.modules["__main__"]
    module = ModuleType(source.module)
    module.__file__ = where
    lines = source.text.splitlines(keepends=True)
    linecache.cache[where] = (len(source.text), None, lines, where)  # for tracebacks where the file is not
    sys.modules[source.module], _loaded[source.module] = module, source
    try:
        exec(compile(source.text, where, "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[source.module], _loaded[source.module]
        raise UsageError(f"{label}: {_in_words(error, where, source.filename)}") from error
    return module


def _in_words(error: BaseException, where: str, filename: str) -> str:
    """An error in the user's file, with the file's line."""
    if isinstance(error, SyntaxError) and error.filename == where:
        line = (error.text or "").strip()
        return f"line {error.lineno} of {filename} is not Python: {error.msg}\n    {line}\nPlease fix that line."
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == where]
    at = f"line {frames[-1].lineno} of {filename}" if frames else filename
    source_line = f"\n    {frames[-1].line}" if frames and frames[-1].line else ""
    what = f"{at} fails with {type(error).__name__}: {error}{source_line}"
    if isinstance(error, ImportError):
        return f"{what}\nThe module that it imports must be installed in this Python, and on every node of a cluster."
    if isinstance(error, SystemExit):
        return f'{what}\nPut what is not a definition under `if __name__ == "__main__":`.'
    return f"{what}\nPlease fix that line."


def _refuse_siblings(text: str, file: Path, label: str) -> None:
    """Raises ``UsageError`` for the import of a module next to the file: workers elsewhere lack it."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return  # reported with its line when the file is run
    fix = "Workers get this file alone: use one file, or a package installed on every node, named package.module:Name."
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            dots = "." * node.level + (node.module or "")
            raise UsageError(f"{label}: line {node.lineno} of {file.name} imports {dots!r} relative to itself. {fix}")
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for name in names:
            top = name.partition(".")[0]
            beside = (file.parent / f"{top}.py", file.parent / top / "__init__.py")
            installed = {"perturbations", "ngrpo"} | sys.stdlib_module_names
            if any(path.is_file() for path in beside) and top not in installed | packages_distributions().keys():
                raise UsageError(f"{label}: line {node.lineno} of {file.name} imports {name!r} from its folder. {fix}")


def _decode(file: Path, label: str) -> str:
    try:
        return importlib.util.decode_source(file.read_bytes())
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise UsageError(f"{label}: {str(file)!r} cannot be read as Python text ({error}). Save it as UTF-8.") from None


def _packed(filename: str, text: str, label: str) -> UserFile:
    packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    if len(packed) > _LONGEST:
        size = f"{len(packed):,} bytes compressed, at most {_LONGEST:,}"
        fix = "make it a package, installed on every node, and name it package.module:Name"
        raise UsageError(f"{label}: {filename} is too long for a spec ({size}): {fix}.")
    return UserFile(filename, text, packed)


def _unpack(packed: str, label: str) -> str:
    try:
        return zlib.decompress(base64.b64decode(packed, validate=True)).decode()
    except (binascii.Error, zlib.error, UnicodeDecodeError, TypeError, ValueError):
        fix = "Leave 'source' out where there is the file, or take the whole spec from spec()"
        raise UsageError(f"{label}: its 'source' is not the text of a file as spec() packs it. {fix}.") from None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
