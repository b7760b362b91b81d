# SPDX-License-Identifier: Apache-2.0
"""Is a gap in bfloat16 rounding? Engine and trainer against a float32 forward of the same weights.

    python -m benchmarks.models.rounding TYPE [--under "prefix caching"]

Rolls out as `benchmarks.models` does, and prints for each perturbation the mean and largest distance of the engine and
of the trainer to a float32 forward that replays the same records, and the token on which both differ most: where both
lie about as far from it as the other, on either side, neither is wrong.
"""

import argparse
import logging
import os
import tempfile
import warnings
from pathlib import Path

import torch


def main() -> None:
    from transformers import AutoConfig

    from benchmarks.machine import describe
    from benchmarks.models import tiny
    from benchmarks.models.case import Case, Engines
    from ngrpo.machine.models.packaged import resolve
    from tests.stack.harness import replay_log_probs

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("type", metavar="TYPE")
    parser.add_argument("--under", choices=["preemption", "prefix caching"], default="")
    options = parser.parse_args()
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
        half, full = (auto.from_pretrained(folder, dtype=d).eval() for d in (torch.bfloat16, torch.float32))
    print(describe())
    for name, rollouts in answer["rollouts"].items():
        engine = torch.cat([torch.from_numpy(rollout.log_probs.copy()) for rollout in rollouts])
        trainer, exact = (torch.cat(replay_log_probs(model, rollouts)) for model in (half, full))
        parts = [
            f"{side} mean {float((values - exact).abs().mean()):.3f} largest {float((values - exact).abs().max()):.2f}"
            for side, values in (("engine", engine), ("trainer", trainer))
        ]
        worst = int((trainer - engine).abs().argmax())
        token = f"engine {engine[worst]:.2f}, trainer {trainer[worst]:.2f}, float32 {exact[worst]:.2f}"
        print(f"{name:9s} {'; '.join(parts)}; where they differ most: {token}", flush=True)


if __name__ == "__main__":
    main()
