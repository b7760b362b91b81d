# SPDX-License-Identifier: Apache-2.0
"""Checks of the starting machine (caches, sockets, shadowed packages): each fault would end a run minutes later."""

import os
import sysconfig
import tempfile
from dataclasses import dataclass
from datetime import datetime
from importlib.machinery import PathFinder
from pathlib import Path
from uuid import uuid4

from ngrpo.machine.upstream import placement
from perturbations.errors import UsageError

# The longest path of a Unix socket that Linux takes; Ray 2.55 refuses longer ones.
_SOCKET_BYTES = 107
# Packages of a checkout that may also lie in site-packages: this project, and folders that packages leave there.
_HARMLESS = {"benchmarks", "docs", "examples", "ngrpo", "perturbations", "scripts", "setup", "test", "tests"}


def check() -> None:
    """Raises ``UsageError`` for the first of the faults below."""
    check_caches()
    check_sockets()
    check_shadowed()


def check_caches() -> None:
    """Raises ``UsageError`` where a package's cache cannot be written, as below a HOME that is read-only."""
    broken = [cache for cache in _caches() if not _can_be_written(cache.folder)]
    if broken:
        names = ", ".join(f"{cache.owner} ({cache.folder})" for cache in broken)
        variables = ", ".join(dict.fromkeys(cache.variable for cache in broken))
        raise UsageError(
            f"these caches cannot be written: {names}. Set HOME, now {Path('~').expanduser()}, to a folder that may be"
            f" written, or give other folders by {variables}."
        )


@dataclass(frozen=True)
class _Cache:
    """A package's cache.

    Attributes:
        owner: the package, in the genitive.
        variable: the environment variable that names another folder.
        default: the folder without that variable.
    """

    owner: str
    variable: str
    default: Path

    @property
    def folder(self) -> Path:
        return Path(os.environ.get(self.variable) or self.default)


def _caches() -> list[_Cache]:
    """The caches that a training writes."""
    home = Path("~").expanduser()
    shared = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    hugging_face = Path(os.environ.get("HF_HOME") or shared / "huggingface")
    triton = Path(os.environ.get("TRITON_HOME") or home)
    return [
        # Not all of HF_HOME: models may be in a shared folder that nobody writes to.
        _Cache("datasets'", "HF_DATASETS_CACHE", hugging_face / "datasets"),
        _Cache("vLLM's", "VLLM_CACHE_ROOT", shared / "vllm"),
        _Cache("torch's and DeepSpeed's compiled extensions'", "TORCH_EXTENSIONS_DIR", shared / "torch_extensions"),
        _Cache("Triton's", "TRITON_CACHE_DIR", triton / ".triton" / "cache"),
    ]


def _can_be_written(path: Path) -> bool:
    """Whether a file can be made in a folder, or in the first of its parents that exists."""
    base = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    # A file is made, since permissions say nothing of a read-only file system, and nothing to the superuser.
    try:
        tempfile.TemporaryFile(dir=base).close()
    except OSError:
        return False
    return True


def check_sockets() -> None:
    """Raises ``UsageError`` where the folder for temporary files makes paths of sockets too long."""
    temporary = os.environ.get("TMPDIR") or "/tmp"
    if (os.environ.get("RAY_ADDRESS") or placement.started_here()) in (None, "local"):
        variable = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
        # As Ray 2.55 names the socket of its object store (_private/node.py).
        session = f"session_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}_{os.getpid()}"
        _check_socket("Ray", variable, os.environ.get("RAY_TMPDIR", temporary), f"ray/{session}/sockets/plasma_store")
    variable = "VLLM_RPC_BASE_PATH" if "VLLM_RPC_BASE_PATH" in os.environ else "TMPDIR"
    _check_socket("vLLM", variable, os.environ.get("VLLM_RPC_BASE_PATH", temporary), str(uuid4()))


def _check_socket(owner: str, variable: str, folder: str, name: str) -> None:
    room = _SOCKET_BYTES - len(f"/{name}")
    used = len(folder.rstrip("/").encode())
    if used > room:
        raise UsageError(
            f"{variable}={folder}: has {used} bytes, and the sockets that {owner} makes there leave room for {room}."
            f" Set {variable} to a shorter path, such as /tmp."
        )


def check_shadowed() -> None:
    """Raises ``UsageError`` where a package of the working directory takes an installed one's place in Ray's workers.

    Ray puts the working directory of the start in front of their ``sys.path``.
    """
    site_packages = [sysconfig.get_path(kind) for kind in ("purelib", "platlib")]
    for path in sorted(Path.cwd().iterdir()):
        is_package = (path / "__init__.py").is_file()
        if not (is_package or path.suffix == ".py") or path.stem in _HARMLESS:
            continue
        installed = PathFinder.find_spec(path.stem, site_packages)
        if installed is not None and installed.origin is not None:
            raise UsageError(
                f"{path} takes the place of the installed package {path.stem!r} ({installed.origin}) in Ray's workers,"
                " which find the working directory first. Start the run in another folder, or rename it."
            )
