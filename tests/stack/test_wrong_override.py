# SPDX-License-Identifier: Apache-2.0
"""A wrong override fails: in the start-up check before any request, and in the first step's check of the gap.

The models have a plain embedding, a scaled one, and one in vLLM's Transformers backend, in bfloat16 and float32. That
backend changes Transformers' classes, so that an engine runs in a process of its own, whose program is this file.
"""

import math
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ngrpo.rollout import startup_check
from ngrpo.rollout.check_texts import CheckFailure
from ngrpo.rollout.input_override import PLAIN, InputOverride
from ngrpo.trainers.common.mismatch import GapScale, MismatchTooLarge, step_metrics
from perturbations.replay.trajectory import FinishedTrajectory
from tests.stack.harness import Rollout, build_engine, gaps, replay_log_probs, sample
from tests.stack.tiny_models import FORMS, HIDDEN, tiny_model
from tests.support.own_process import run_module

_ORIGINAL = {name: vars(InputOverride)[name] for name in ("lay_out", "put_drawn", "place_stored")}


def _laid_out(change: Callable[[np.ndarray], np.ndarray]) -> dict[str, Callable[..., None]]:
    """An override that feeds its rows from other sources than the perturber says: from ``change`` of them."""

    def lay_out(self: InputOverride, sources: np.ndarray, upload: Any) -> None:
        _ORIGINAL["lay_out"](self, change(sources), upload)

    return {"lay_out": lay_out}


def _one_row_off(sources: np.ndarray) -> np.ndarray:
    return np.concatenate([[PLAIN], sources[:-1]]).astype(np.int32)


def _first_row(sources: np.ndarray) -> np.ndarray:
    """Only the first row gets its source, as where ids of shape (1, N) are taken for one row."""
    is_first = np.arange(len(sources)) == 0
    return np.where(is_first, sources, PLAIN).astype(np.int32)


def _others_disturbed(sources: np.ndarray) -> np.ndarray:
    shifted = _one_row_off(sources)
    return np.where(shifted == PLAIN, sources, shifted)


def _scaled_drawn(self: InputOverride, rows: Any, vectors: Any, fed: Any) -> None:
    _ORIGINAL["put_drawn"](self, rows, vectors * math.sqrt(HIDDEN), fed)


def _scaled_stored(self: InputOverride, rows: Any, vectors: Any) -> None:
    _ORIGINAL["place_stored"](self, rows, vectors * math.sqrt(HIDDEN))


OVERRIDES: dict[str, dict[str, Callable[..., None]]] = {
    "right": {},
    "dropped": _laid_out(lambda sources: np.full_like(sources, PLAIN)),
    "one row off": _laid_out(_one_row_off),
    "first row alone": _laid_out(_first_row),
    "scaled once too often": {"put_drawn": _scaled_drawn, "place_stored": _scaled_stored},
    "others disturbed": _laid_out(_others_disturbed),
}

PROMPTS = [[1, *range(10 + 7 * number, 15 + 8 * number)] for number in range(4)]
# As `--perturbation.gap_limit`: how many times the unperturbed mean gap a step's mean gap may be.
_LIMIT = 10.0


@dataclass(frozen=True)
class Outcome:
    """What an engine with one of OVERRIDES did.

    Attributes:
        failure: the message of the start-up check; None if it passed.
        seconds: how long the start-up check took; None if it failed.
        unperturbed, rollouts: sampled from PROMPTS, without and with the perturbation.
    """

    failure: str | None
    seconds: float | None
    unperturbed: list[Rollout]
    rollouts: list[Rollout]


class Case:
    """Rollouts of one model in one dtype under each of OVERRIDES, and the model in Transformers."""

    def __init__(self, form: str, dtype: str, folder: Path, eager: bool = True) -> None:
        from transformers import AutoModelForCausalLM

        path = tiny_model(form, folder)
        target = folder / "outcomes.pickle"
        run_module("tests.stack.test_wrong_override", form, path, dtype, str(eager), str(target))
        fields = pickle.loads(target.read_bytes())
        self.outcomes = {override: Outcome(**of_override) for override, of_override in fields.items()}
        self.half = dtype != "float32"
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))

    def scale(self, override: str) -> GapScale:
        """The scale of a run whose first rollouts are those of this override."""
        scale = GapScale(self.half)
        gap = gaps(self.model, self.outcomes[override].unperturbed).mean().item()
        scale.check({"perturbation/gap_unperturbed_mean": gap}, _LIMIT, strict=True)
        return scale

    def check_step(self, rollouts: list[Rollout], scale: GapScale) -> None:
        """A training step's check of the gap; it raises ``MismatchTooLarge``."""
        trajectories = []
        trainer_log_probs = []
        for rollout, replayed in zip(rollouts, replay_log_probs(self.model, rollouts)):
            of_prompt = np.full(len(rollout.prompt), np.nan, np.float32)
            log_probs = np.concatenate([of_prompt, rollout.log_probs])
            trajectories.append(FinishedTrajectory(rollout.record, log_probs))
            trainer_log_probs.append(np.concatenate([of_prompt, replayed.numpy()]))
        metrics = step_metrics(trajectories, trainer_log_probs)
        scale.check(metrics, _LIMIT, strict=True)

    def check_first_step(self, override: str) -> None:
        self.check_step(self.outcomes[override].rollouts, self.scale(override))


def _cases() -> list[Any]:
    """Each form of embedding in each dtype; all but one of these are slow."""
    cases = []
    for form in ("plain", "transformers", "scaled", "multiplied", "transformers_scaled"):
        for dtype in ("bfloat16", "float32"):
            is_fast = (form, dtype) == ("transformers", "bfloat16")
            marks = [] if is_fast else [pytest.mark.slow]
            cases.append(pytest.param((form, dtype), id=f"{form}-{dtype}", marks=marks))
    return cases


@pytest.fixture(scope="module", params=_cases())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    form, dtype = request.param
    return Case(form, dtype, tmp_path_factory.mktemp("case"))


def test_the_probe_tells_right_from_wrong(case: Case) -> None:
    right = case.outcomes["right"]
    assert right.failure is None
    assert right.seconds < 60.0, "it hangs"
    for override, outcome in case.outcomes.items():
        if override == "right":
            continue
        assert outcome.failure is not None, override
        assert "does not feed" in outcome.failure
        assert "off by" in outcome.failure


def test_a_right_override_rings_nothing(case: Case) -> None:
    case.check_first_step("right")


@pytest.mark.parametrize("override", [name for name in OVERRIDES if name != "right"])
def test_a_wrong_override_rings(case: Case, override: str) -> None:
    with pytest.raises(MismatchTooLarge, match="where nothing is perturbed"):
        case.check_first_step(override)


def test_the_record_of_another_sample_rings(case: Case) -> None:
    rollouts = case.outcomes["right"].rollouts
    records = [rollout.record for rollout in rollouts]
    shifted_records = [records[-1], *records[:-1]]
    mixed_up = [replace(rollout, record=record) for rollout, record in zip(rollouts, shifted_records)]
    scale = case.scale("right")
    with pytest.raises(MismatchTooLarge, match="where nothing is perturbed"):
        case.check_step(mixed_up, scale)


def test_a_stale_weight_rings(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of the trainer's first layer has moved, and the engine did not take it: later, or from the start on."""
    rollouts = case.outcomes["right"].rollouts
    scale_before = case.scale("right")
    weights = dict(case.model.named_parameters())
    (name,) = (name for name in weights if name.endswith("layers.0.mlp.down_proj.weight"))
    monkeypatch.setattr(weights[name], "data", -weights[name].data)
    with pytest.raises(MismatchTooLarge, match="where nothing is perturbed"):
        case.check_step(rollouts, scale_before)
    with pytest.raises(MismatchTooLarge, match="have not the same weights"):
        case.check_first_step("right")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["plain", "transformers", "scaled"])
def test_in_a_compiled_graph(form: str, tmp_path: Path) -> None:
    case = Case(form, "float32", tmp_path, eager=False)
    test_the_probe_tells_right_from_wrong(case)
    case.check_first_step("right")


@pytest.mark.parametrize("form", ["per_layer", pytest.param("per_layer_3n", marks=pytest.mark.slow)])
def test_tables_that_follow_the_token_in_the_text(form: str, tmp_path: Path) -> None:
    """The main table is perturbed; the one for each layer is looked up with the text's token, on both sides."""
    case = Case(form, "float32", tmp_path)
    test_the_probe_tells_right_from_wrong(case)
    rollouts = case.outcomes["right"].rollouts
    assert gaps(case.model, rollouts).max() <= 1e-4
    assert gaps(case.model, rollouts, replay=False).max() >= 1e-2


def main(form: str, model: str, dtype: str, eager: str, target: str) -> None:
    """Writes the fields of an :class:`Outcome` for each of OVERRIDES, one after the other in the same engine."""
    _, _, engine_options = FORMS[form]
    options = {**engine_options, "dtype": dtype, "enforce_eager": eager == "True", "max_model_len": 128}
    llm = build_engine(model, {"name": "neighbor", "variant": "released", "rate": 0.5, "k": 4}, **options)
    core = llm.llm_engine.engine_core.engine_core
    perturbed = [{"seed": number} for number in range(len(PROMPTS))]
    unperturbed = [{"seed": number, "enabled": False} for number in range(len(PROMPTS))]
    outcomes = {}
    for name, methods in OVERRIDES.items():
        for method, function in {**_ORIGINAL, **methods}.items():
            setattr(InputOverride, method, function)
        seconds = None
        failure = None
        try:
            seconds = startup_check.check_core(core)
        except CheckFailure as error:
            failure = str(error)
            # The engine would refuse requests until the check has passed; this test needs its rollouts all the same.
            setattr(core, startup_check._DUE, False)
        outcomes[name] = {
            "failure": failure,
            "seconds": seconds,
            "unperturbed": sample(llm, PROMPTS, unperturbed, max_tokens=16),
            "rollouts": sample(llm, PROMPTS, perturbed, max_tokens=40),
        }
    Path(target).write_bytes(pickle.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Python's interpreter does not end cleanly with vLLM's engines in it.
    sys.stdout.flush()
    os._exit(0)
