"""Indices on disk: one file each, bound to the embedding that it was made from."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from perturbations.errors import UsageError

_FORMAT = 1
_DIGEST_BYTES = 32


def fingerprint(embedding: Tensor) -> str:
    """SHA-256 of an embedding's shape, type and values, as hexadecimal text."""
    rows = embedding.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{tuple(rows.shape)} {rows.dtype}".encode())
    for part in rows.split(4096):
        digest.update(part.view(torch.uint8).numpy())
    return digest.hexdigest()


def _digest(file: BinaryIO) -> bytes:
    """SHA-256 of all that follows a file's own digest, which stands first in it."""
    digest = hashlib.sha256()
    file.seek(_DIGEST_BYTES)
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.digest()


def write(path: str | Path, kind: str, embedding: Tensor, header: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Writes an index. Another process sees the old file or the whole new one, never a part.

    Args:
        path: the file.
        kind: the class's name.
        embedding: (V, D), which :func:`read` will ask for again.
        header: plain values.
        arrays: numpy arrays or tensors by name.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {**header, "format": _FORMAT, "kind": kind, "embedding": fingerprint(embedding)}
    text = np.frombuffer(json.dumps(header, sort_keys=True).encode(), dtype=np.uint8)
    handle, temporary = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(_DIGEST_BYTES))
            np.savez(file, header=text, **{name: np.asarray(array) for name, array in arrays.items()})
        with open(temporary, "r+b") as file:
            digest = _digest(file)
            file.seek(0)
            file.write(digest)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read(path: str | Path, kind: str, embedding: Tensor) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads what :func:`write` wrote.

    Raises:
        FileNotFoundError: where there is no file.
        UsageError: for a file of another kind or format, or made from another embedding.
    """
    try:
        with open(path, "rb") as whole:
            # Before anything is parsed: a damaged length may ask for any amount of memory.
            if whole.read(_DIGEST_BYTES) != _digest(whole):
                raise ValueError("its checksum is not that of its content")
            whole.seek(_DIGEST_BYTES)
            with np.load(whole, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        header = json.loads(arrays.pop("header").tobytes())
    except FileNotFoundError:
        raise
    except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} is no saved neighbor index ({error}): make it with {kind}.save().") from error
    if (header.get("format"), header.get("kind")) != (_FORMAT, kind):
        raise UsageError(
            f"{path} holds {header.get('kind')!r}, format {header.get('format')}: {kind!r}, format {_FORMAT}, is"
            " needed. Make it anew with save()."
        )
    if header["embedding"] != fingerprint(embedding):
        raise UsageError(
            f"{path} was made from another embedding than this one, {tuple(embedding.shape)} {embedding.dtype}"
            f" (SHA-256 {header['embedding'][:12]}… there): an index belongs to one state of the weights. Build it"
            " from these and save it again."
        )
    return header, arrays
