# SPDX-License-Identifier: Apache-2.0
"""One case in its own process: ``python -m benchmarks.gpu.case MODULE FILE ARGUMENTS``.

Each row of figures goes to FILE as a line of JSON as soon as it is there, so a case that is killed leaves what it had.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path


def main(module: str, target: str, arguments: str) -> int:
    """Measures, and returns the exit code."""
    with Path(target).open("a", encoding="utf-8") as file:
        for row in import_module(module).measure(json.loads(arguments)):
            print(json.dumps(row), file=file, flush=True)
    return 0


if __name__ == "__main__":
    try:
        status = main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        status = 1
    # vLLM's engines and Triton's interpreter do not end well together with the interpreter of Python.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
