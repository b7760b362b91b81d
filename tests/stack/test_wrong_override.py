# SPDX-License-Identifier: Apache-2.0
"""A wrong override is seen: by the start-up check before any request, and by the gap's scale on the first step.

On a plain embedding, a scaled one, and one in vLLM's Transformers backend, in bfloat16 and float32. That backend
changes Transformers' classes, so that rollouts are in a process of their own, which runs this file.
"""

import math
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.rollout import startup_check
from ngrpo.rollout.check_texts import CheckFailure
from ngrpo.rollout.input_override import PLAIN, InputOverride
from ngrpo.trainers.common.mismatch import GapScale, ReplayGap, step_metrics
from perturbations.replay.trajectory import FinishedTrajectory
from tests.stack.harness import build_engine, gaps, replay_log_probs, sample
from tests.stack.tiny_models import FORMS, HIDDEN, tiny_model
from tests.support.own_process import run_module

_ORIGINAL = {name: vars(InputOverride)[name] for name in ("lay_out", "put_drawn", "store_edits")}


def _laid_out(change: Callable[[np.ndarray], np.ndarray]) -> dict[str, Callable[..., None]]:
    """An override whose rows have other sources than the perturber says."""

    def lay_out(self: InputOverride, sources: np.ndarray, upload: Any) -> None:
        _ORIGINAL["lay_out"](self, change(sources), upload)

    return {"lay_out": lay_out}


def _one_row_off(sources: np.ndarray) -> np.ndarray:
    return np.concatenate([[PLAIN], sources[:-1]]).astype(np.int32)


def _first_row(sources: np.ndarray) -> np.ndarray:
    """As where ids of shape (1, N) are taken for one row: only what belongs there anyway is right."""
    return np.where(np.arange(len(sources)) == 0, sources, PLAIN).astype(np.int32)


def _others_disturbed(sources: np.ndarray) -> np.ndarray:
    shifted = _one_row_off(sources)
    return np.where(shifted == PLAIN, sources, shifted)


def _scaled_drawn(self: InputOverride, rows: Any, vectors: Any, fed: Any) -> None:
    _ORIGINAL["put_drawn"](self, rows, vectors * math.sqrt(HIDDEN), fed)


def _scaled_stored(self: InputOverride, rows: Any, vectors: Any) -> None:
    _ORIGINAL["store_edits"](self, rows, vectors * math.sqrt(HIDDEN))


OVERRIDES: dict[str, dict[str, Callable[..., None]]] = {
    "right": {},
    "dropped": _laid_out(lambda sources: np.full_like(sources, PLAIN)),
    "one row off": _laid_out(_one_row_off),
    "first row alone": _laid_out(_first_row),
    "scaled once too often": {"put_drawn": _scaled_drawn, "store_edits": _scaled_stored},
    "others disturbed": _laid_out(_others_disturbed),
}

PROMPTS = [[1, *range(10 + 7 * i, 15 + 8 * i)] for i in range(4)]

_CASES = [
    pytest.param((form, dtype), id=f"{form}-{dtype}", marks=[] if (form, dtype) == always else [pytest.mark.slow])
    for form in ("plain", "transformers", "scaled", "multiplied", "transformers_scaled")
    for dtype in ("bfloat16", "float32")
    for always in [("transformers", "bfloat16")]
]
_LIMIT = 10.0


class Case:
    """Rollouts of one model in one dtype, and Transformers' side of it."""

    def __init__(self, form: str, dtype: str, folder: Path, eager: bool = True) -> None:
        from transformers import AutoModelForCausalLM

        path, target = tiny_model(form, folder), folder / "rollouts.pickle"
        run_module("tests.stack.test_wrong_override", form, path, dtype, str(eager), str(target))
        self.found = pickle.loads(target.read_bytes())
        self.half = dtype != "float32"
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))

    def scale(self, kind: str = "right") -> GapScale:
        """That of a start with rollouts of this kind."""
        made, unperturbed = GapScale(self.half), gaps(self.model, self.found[kind]["unperturbed"]).mean().item()
        made.check({"perturbation/gap_unperturbed_mean": unperturbed}, _LIMIT, strict=True)
        return made

    def judge(self, kind: str, scale: GapScale | None = None, shift: int = 0) -> None:
        """A training step's alarm, on rollouts of this kind; with ``shift`` each has the record of another."""
        rollouts = self.found[kind]["rollouts"]
        given = [replace(r, record=rollouts[i - shift].record) for i, r in enumerate(rollouts)]
        kept, theirs = [], []
        for rollout, now in zip(given, replay_log_probs(self.model, given)):
            nothing = np.full(len(rollout.prompt), np.nan, np.float32)
            kept.append(FinishedTrajectory(rollout.record, np.concatenate([nothing, rollout.log_probs])))
            theirs.append(np.concatenate([nothing, now.numpy()]))
        (scale or self.scale(kind)).check(step_metrics(kept, theirs), _LIMIT, strict=True)


@pytest.fixture(scope="module", params=_CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(*request.param, tmp_path_factory.mktemp("case"))


def test_the_probe_tells_right_from_wrong(case: Case) -> None:
    failures = {name: found["failure"] for name, found in case.found.items()}
    assert failures.pop("right") is None
    for name, failure in failures.items():
        assert failure is not None, name
        assert "does not feed" in failure and "off by" in failure
    assert case.found["right"]["seconds"] < 5.0


def test_a_right_override_rings_nothing(case: Case) -> None:
    case.judge("right")


@pytest.mark.parametrize("kind", [name for name in OVERRIDES if name != "right"])
def test_a_wrong_override_rings(case: Case, kind: str) -> None:
    with pytest.raises(ReplayGap, match="where nothing is perturbed"):
        case.judge(kind)


def test_the_record_of_another_sample_rings(case: Case) -> None:
    with pytest.raises(ReplayGap, match="where nothing is perturbed"):
        case.judge("right", shift=1)


def test_a_stale_weight_rings(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of the trainer's first layer has moved, and the engine did not take it: later, or from the start on."""
    scale = case.scale()
    weight = next(p for name, p in case.model.named_parameters() if name.endswith("layers.0.mlp.down_proj.weight"))
    monkeypatch.setattr(weight, "data", -weight.data)
    with pytest.raises(ReplayGap, match="where nothing is perturbed"):
        case.judge("right", scale)
    with pytest.raises(ReplayGap, match="have not the same weights"):
        case.judge("right")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["plain", "transformers", "scaled"])
def test_in_a_compiled_graph(form: str, tmp_path: Path) -> None:
    case = Case(form, "float32", tmp_path, eager=False)
    test_the_probe_tells_right_from_wrong(case)
    case.judge("right")


@pytest.mark.parametrize("form", [pytest.param("per_layer"), pytest.param("per_layer_3n", marks=pytest.mark.slow)])
def test_tables_that_follow_the_token_in_the_text(form: str, tmp_path: Path) -> None:
    """The main table is perturbed; the one for each layer is looked up with the text's token, on both sides."""
    case = Case(form, "float32", tmp_path)
    test_the_probe_tells_right_from_wrong(case)
    rollouts = case.found["right"]["rollouts"]
    assert gaps(case.model, rollouts).max() <= 1e-4
    assert gaps(case.model, rollouts, replay=False).max() >= 1e-2


def main(form: str, model: str, dtype: str, eager: str, target: str) -> None:
    options = {**FORMS[form][2], "dtype": dtype, "enforce_eager": eager == "True", "max_model_len": 128}
    llm = build_engine(model, {"name": "neighbor", "variant": "released", "rate": 0.5, "k": 4}, **options)
    core = llm.llm_engine.engine_core.engine_core
    seeds: list[dict[str, Any]] = [{"seed": i} for i in range(len(PROMPTS))]
    found: dict[str, Any] = {}
    for name, methods in OVERRIDES.items():
        for method, function in {**_ORIGINAL, **methods}.items():
            setattr(InputOverride, method, function)
        try:
            seconds, failure = startup_check.check_core(core), None
        except CheckFailure as error:
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
