# SPDX-License-Identifier: Apache-2.0
"""Run by test_wrong_override.py, in a process of its own: rollouts of an engine with each wrong override, pickled.

vLLM's Transformers backend changes Transformers' classes, so that the replay is in another process. Arguments: the
form of the model, its folder, the dtype, True for eager, where the result goes.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ngrpo.rollout import startup_check
from ngrpo.rollout.input_override import InputOverride
from tests.stack.harness import build_engine, sample
from tests.stack.tiny_models import FORMS, HIDDEN

_put = InputOverride.put


def _dropped(_self: InputOverride, _rows: Any, _vectors: Any, _mask: Any = None, _on_host: Any = None) -> None:
    return


def _one_row_off(self: InputOverride, rows: Any, vectors: Any, mask: Any = None, _on_host: Any = None) -> None:
    _put(self, rows + 1, vectors, mask)


def _first_row(self: InputOverride, rows: Any, vectors: Any, mask: Any = None, _on_host: Any = None) -> None:
    """As where ids of shape (1, N) are taken for one row: only what belongs there anyway is right."""
    kept = rows == 0
    _put(self, rows[kept], vectors[kept], None if mask is None else mask[kept])


def _scaled(self: InputOverride, rows: Any, vectors: Any, mask: Any = None, _on_host: Any = None) -> None:
    _put(self, rows, vectors * math.sqrt(HIDDEN), mask)


def _others_disturbed(self: InputOverride, rows: Any, vectors: Any, mask: Any = None, _on_host: Any = None) -> None:
    _put(self, rows, vectors, mask)
    _put(self, rows + 1, vectors, mask)


PUTS: dict[str, Callable[..., None]] = {
    "right": _put,
    "dropped": _dropped,
    "one row off": _one_row_off,
    "first row alone": _first_row,
    "scaled once too often": _scaled,
    "others disturbed": _others_disturbed,
}

PROMPTS = [[1, *range(10 + 7 * i, 15 + 8 * i)] for i in range(4)]


def main(form: str, model: str, dtype: str, eager: str, target: str) -> None:
    options = {**FORMS[form][2], "dtype": dtype, "enforce_eager": eager == "True", "max_model_len": 128}
    llm = build_engine(model, {"name": "neighbor", "variant": "released", "rate": 0.5, "k": 4}, **options)
    core = llm.llm_engine.engine_core.engine_core
    seeds: list[dict[str, Any]] = [{"seed": i} for i in range(len(PROMPTS))]
    found: dict[str, Any] = {}
    for name, put in PUTS.items():
        InputOverride.put = put
        try:
            seconds, failure = startup_check.check_core(core), None
        except startup_check.CheckFailure as error:
            seconds, failure = None, str(error)
            setattr(core, startup_check._DUE, False)  # or it would refuse the rollouts, which are to be judged too
        unperturbed = sample(llm, PROMPTS, [{**each, "enabled": False} for each in seeds], max_tokens=16)
        rollouts = sample(llm, PROMPTS, seeds, max_tokens=40)
        found[name] = {"failure": failure, "seconds": seconds, "unperturbed": unperturbed, "rollouts": rollouts}
    Path(target).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
    # vLLM's engines do not end well together with the interpreter of Python.
    sys.stdout.flush()
    os._exit(0)
