# SPDX-License-Identifier: Apache-2.0
"""usage: ngrpo model NAME
       ngrpo model merge ADAPTER FOLDER [BASE]

Makes a packaged model into a local Hugging Face folder, once, and prints the
folder's path. "merge" writes the whole model of a LoRA adapter's folder to a
new folder; BASE takes the place of the base model that the adapter names.

examples
  ngrpo model smollm2-135m
  ngrpo eval --model "$(ngrpo model smollm2-135m)" --task arithmetic
  ngrpo model merge runs/lora/model merged

packaged models: {models}
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ngrpo.machine.console import Report, docstring
from ngrpo.machine.models import packaged
from ngrpo.machine.storage.result_folder import writing
from perturbations.errors import UsageError, nearest


def usage(command: str, argv: Sequence[str]) -> str:
    """The docstring with the models."""
    return docstring(sys.modules[__name__]).replace("{models}", ", ".join(packaged.PACKAGED))


def run(argv: Sequence[str], *, report: Report) -> int:
    """Makes the model where it is not there yet, or merges an adapter, and prints the folder."""
    if len(argv) in (3, 4) and argv[0] == "merge":
        print(merge(*argv[1:], report=report))
        return 0
    if len(argv) != 1 or argv[0].startswith("-"):
        print(usage("model", argv), end="")
        return 2
    name = argv[0]
    if name not in packaged.PACKAGED:
        hint = nearest(name, packaged.PACKAGED)
        raise UsageError(f"unknown packaged model {name!r}.{hint} Available: {', '.join(packaged.PACKAGED)}.")
    print(packaged.resolve(name, report=report))
    return 0


def merge(adapter: str, folder: str, base: str | None = None, *, report: Report) -> Path:
    """Writes the whole model of an adapter to a folder that is not there yet; returns the folder."""
    target = Path(folder).expanduser().absolute()
    if target.exists():
        raise UsageError(f"{folder} is there already. Give the name of a new folder.")
    merged = packaged.merged_adapter(adapter, base, report=report)
    with writing(target):
        packaged.write_whole(target, lambda draft: shutil.copytree(merged, draft, dirs_exist_ok=True))
    return target
