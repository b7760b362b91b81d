# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own, for a script that replays in another one.

``python -m benchmarks.models.engine_process MODULE FOLDER DTYPE FILE`` is that process: it writes what the module's
``rolled_out(folder, dtype)`` returns to FILE. The trainer's model must not share the engine's process: vLLM changes
classes of transformers that both use.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}


class EngineFailed(RuntimeError):
    """The engine's process ended without a result; ``stderr`` is what it printed."""

    def __init__(self, stderr: str) -> None:
        super().__init__("the engine's process ended without a result")
        self.stderr = stderr


def run(module: str, folder: Path, dtype: str, environment: dict[str, str] | None = None) -> Any:
    """What a module's ``rolled_out(folder, dtype)`` returns in a process of its own.

    Args:
        module: its whole name.
        folder: of the model.
        dtype: of the engine.
        environment: further variables.

    Raises:
        EngineFailed: where there is no result.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rollouts"
        process = subprocess.run(
            [sys.executable, "-m", "benchmarks.models.engine_process", module, str(folder), dtype, str(file)],
            env={**os.environ, **_ENVIRONMENT, **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        if not file.exists():
            raise EngineFailed(process.stderr)
        return pickle.loads(file.read_bytes())


def main(module: str, folder: str, dtype: str, file: str) -> None:
    """Rolls out, and writes the result whole or not at all."""
    warnings.simplefilter("ignore")
    packed = pickle.dumps(import_module(module).rolled_out(folder, dtype))
    Path(file).write_bytes(packed)
    sys.stdout.flush()
    os._exit(0)  # vLLM's engine and the interpreter of Python do not end well together


if __name__ == "__main__":
    main(*sys.argv[1:])
