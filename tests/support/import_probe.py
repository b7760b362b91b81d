# SPDX-License-Identifier: Apache-2.0
"""What a fresh interpreter has imported after a statement."""

import json
import subprocess
import sys

HEAVY = ["torch", "vllm", "openrlhf", "ray", "deepspeed", "transformers"]

PROBE = """
import json, sys, time
before = time.process_time()
{statement}
seconds = time.process_time() - before
print(json.dumps([seconds, sorted(name for name in sys.modules if "." not in name)]))
"""


def probe(statement: str) -> tuple[float, set[str]]:
    """Runs a statement in a fresh interpreter: its processor seconds, and the top-level modules loaded after it."""
    command = [sys.executable, "-c", PROBE.format(statement=statement)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    seconds, modules = json.loads(process.stdout)
    return seconds, set(modules)
