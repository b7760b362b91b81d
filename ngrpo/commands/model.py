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

from ngrpo.models import packaged
from perturbations.errors import UsageError
from perturbations.options import nearest


def run(words: Sequence[str], *, report: Callable[[str], None]) -> int:
    """Makes the model where it is not there yet, and prints its folder.

    Args:
        words: everything after ``ngrpo model``.
        report: called with each line for the user.

    Returns:
        0, or 2 where no model is named.

    Raises:
        UsageError: for an unknown model.
    """
    known = ", ".join(packaged.PACKAGED)
    if len(words) != 1 or words[0].startswith("-"):
        print((__doc__ or "").replace("{models}", known), end="")
        return 0 if list(words) in (["-h"], ["--help"]) else 2
    if words[0] not in packaged.PACKAGED:
        hint = nearest(words[0], packaged.PACKAGED)
        raise UsageError(f"unknown packaged model {words[0]!r}.{hint} Available: {known}.")
    print(packaged.resolve(words[0], report=report))
    return 0
