# SPDX-License-Identifier: Apache-2.0
"""usage: ngrpo list [NAME | compatibility]

All perturbations, gates, advantages and the other kinds that `ngrpo new` knows:
in the tree, of installed packages, and their papers. With a name: its options
with ranges and defaults. compatibility: the table of what does not go with what
(docs/compatibility.md).

examples
  ngrpo list
  ngrpo list neighbor
  ngrpo list compatibility
  ngrpo list ./mine.py:Mine
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence

from ngrpo.config.compatibility import page
from ngrpo.machine.console.catalogue import described, listing
from perturbations.errors import UsageError


def run(argv: Sequence[str], *, report: Callable[[str], None]) -> int:
    """Prints the table, or one entry in full."""
    if len(argv) > 1:
        raise UsageError(f"ngrpo list takes one name at most, got {' '.join(argv)!r}.")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(page() if argv == ["compatibility"] else described(argv[0]) if argv else listing(width))
    return 0
