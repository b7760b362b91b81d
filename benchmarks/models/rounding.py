# SPDX-License-Identifier: Apache-2.0
"""Is a gap in bfloat16 rounding? Engine and trainer against a float32 forward of the same weights.

    python -m benchmarks.models.rounding TYPE [--under "prefix caching"]

Rolls out as `benchmarks.models` does, and prints for each perturbation the mean and largest distance of the engine and
of the trainer to a float32 forward that replays the same records, and the token on which both differ most: where both
lie about as far from it as the other, on either side, neither is wrong.
"""

import logging
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import parser_of


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("type", metavar="TYPE")
    parser.add_argument("--under", choices=["preemption", "prefix caching"], default="")
    options = parser.parse_args()
    from transformers import AutoConfig

    from benchmarks.machine import describe
    from benchmarks.models import tiny
    from benchmarks.models.case import Case, Engines
    from ngrpo.machine.models.packaged import resolve

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    torch.set_num_threads(1)
    case = Case(options.type, dtype="bfloat16", under=options.under)
    with tempfile.TemporaryDirectory() as scratch, Engines() as engines:
        folder = Path(scratch) / case.type
        folder.mkdir()
        tiny.build(case.type, folder, Path(resolve("smollm2-135m")), torch.bfloat16)
        answer = engines.run(case, folder, Path(scratch) / "log", 300.0)
        if "rollouts" not in answer:
            raise SystemExit(f"{answer['verdict']}: {answer['message']}")
        auto = tiny.model_class(AutoConfig.from_pretrained(folder))
        bfloat16_model = auto.from_pretrained(folder, dtype=torch.bfloat16).eval()
        float32_model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    print(describe())
    for name, rollouts in answer["rollouts"].items():
        print(_row(name, rollouts, bfloat16_model, float32_model), flush=True)


def _row(name: str, rollouts: list[Any], bfloat16_model: Any, float32_model: Any) -> str:
    """The printed line of a perturbation."""
    from tests.stack.harness import replay_log_probs

    engine = torch.cat([torch.from_numpy(rollout.log_probs.copy()) for rollout in rollouts])
    trainer = torch.cat(replay_log_probs(bfloat16_model, rollouts))
    exact = torch.cat(replay_log_probs(float32_model, rollouts))
    worst = int((trainer - engine).abs().argmax())
    token = f"engine {engine[worst]:.2f}, trainer {trainer[worst]:.2f}, float32 {exact[worst]:.2f}"
    distances = f"{_distance('engine', engine, exact)}; {_distance('trainer', trainer, exact)}"
    return f"{name:9s} {distances}; where they differ most: {token}"


def _distance(side: str, log_probs: torch.Tensor, exact: torch.Tensor) -> str:
    distance = (log_probs - exact).abs()
    return f"{side} mean {float(distance.mean()):.3f} largest {float(distance.max()):.2f}"


if __name__ == "__main__":
    main()
