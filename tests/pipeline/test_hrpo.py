# SPDX-License-Identifier: Apache-2.0
"""HRPO in OpenRLHF: its gate trains, follows the weight sync into the rollout, and is saved beside the model.

Slow, `make test-all`: tests/stack/test_hrpo.py holds its exactness and its gradient.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from ngrpo.machine.storage.parameters_file import FILE
from tests.pipeline.harness import GAP, LOUD, steps_of

pytestmark = [pytest.mark.stack, pytest.mark.slow]


def test_the_gate_trains_is_synced_and_saved(tmp_path: Path, smollm2: str) -> None:
    """The rates are so large that an update which missed the rollout would show in the gap of step 2.

    Adam's first step moves each parameter by its rate: Λ by 4. With the gate of step 1 the rollout of step 2 would be
    off by 0.17 on average.
    """
    rates = ["--perturbation.gate_lr", "0.02", "--perturbation.lambda_lr", "4"]
    kl = ["--algo.kl.use_loss", "--algo.kl.estimator", "k3", "--algo.kl.init_coef", "0.001"]
    first, second = steps_of(tmp_path, smollm2, *LOUD, *kl, "--perturbation", "hrpo", *rates)
    print({name: (first[name], second[name]) for name in ("gap_perturbed_mean", "gap_plain_mean", "shift", "rate")})
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    assert first["rate"] > 0.9 and first["shift"] > 0.0
    assert second["shift"] > 1.5 * first["shift"], "the gate has not changed"
    assert max(first["gap_perturbed_mean"], second["gap_perturbed_mean"]) <= GAP
    (saved,) = tmp_path.rglob(FILE)
    gate = load_file(saved)
    assert set(gate) == {"w_r", "w_i", "lambda_shift"}
    assert all(value.float().abs().max() > 0 for value in gate.values())
    model = saved.parents[1]
    weights = load_file(model / "model.safetensors")
    assert not [name for name in weights if "perturbation" in name]
