# SPDX-License-Identifier: Apache-2.0
"""Run by test_v2_limits.py, in a process that only it sets up: requests that exclude tokens, on the V2 runner.

The argument is the folder of a small random model: Triton's kernels are interpreted, at most of a second a step.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

from tests.stack import as_on_cuda

as_on_cuda.interpret_triton()

from tests.own_process import RESULT  # noqa: E402
from tests.stack.harness import build_engine  # noqa: E402
from tests.stack.request_limits import EVERY, check_mixed_batch, name_of  # noqa: E402


def limits(llm: Any) -> dict[str, Any]:
    """For each perturbation how many positions were perturbed in the mixed batch, or what went wrong."""
    as_on_cuda.apply_grammars_in_pytorch()
    found: dict[str, Any] = {}
    for spec in EVERY:
        began = time.perf_counter()
        try:
            found[name_of(spec)] = check_mixed_batch(llm, spec)
        except Exception:
            found[name_of(spec)] = traceback.format_exc()
        print(name_of(spec), f"{time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return found


def main(model: str) -> None:
    with as_on_cuda.asynchronous():
        llm = build_engine(model, {"name": "neighbor"}, max_model_len=128)
    assert llm.llm_engine.collective_rpc("perturbation_runner") == ["V2"]
    print(RESULT + json.dumps(limits(llm)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    # vLLM's engines and Triton's interpreter do not end well together with the interpreter of Python.
    os._exit(0)
