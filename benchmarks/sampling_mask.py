"""How far is the trainer's log-probability from the one that a truncated rollout drew with, and what corrects it?

    python -m benchmarks.sampling_mask [--model smollm2-135m]

The engine's log-probability after top-p, top-k or min-p is log π_S, π renormalised over the tokens left. Printed for
each of these: |log π_S of the rollout − log π of the trainer| on average and at worst, and the mean of the ratio
π_trainer / π_S of the rollout, with the trainer as it is and with ``--sampling.correct_mask``; then the mean number of
tokens left, and the mask's bytes per token. Float32, so what is left with the correction is rounding.
"""

from __future__ import annotations

import argparse
import os
import warnings

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from benchmarks.machine import describe
from ngrpo.models import resolve
from tests.stack.harness import build_engine, chat_prompts, sample_with_masks, trainer_log_probs

TRUNCATED = {"top_p 0.95": {"top_p": 0.95}, "top_k 50": {"top_k": 50}, "min_p 0.05": {"min_p": 0.05}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    warnings.simplefilter("ignore")
    folder = resolve(options.model)
    config = {"sampling_masks": True}
    llm = build_engine(folder, None, additional_config=config, logprobs_mode="processed_logprobs")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    print(f"{describe()}; {options.model}, float32, temperature 1")
    print(
        f"{'sampling':11s} {'trainer':>9s} {'tokens':>6s} {'mean gap':>9s} {'max gap':>9s} {'mean ratio':>10s}", end=""
    )
    print(f" {'left':>6s} {'bytes/tok':>9s}")
    for name, params in TRUNCATED.items():
        rollouts, masks = sample_with_masks(llm, chat_prompts(llm, copies=2), max_tokens=64, **params)
        drawn = torch.tensor([lp for rollout in rollouts for lp in rollout.engine_log_probs])
        left = sum(len(ids) for mask in masks for ids in mask.left()) / max(sum(map(len, masks)), 1)
        size = sum(len(mask.to_bytes()) for mask in masks) / len(drawn)
        for trainer, given in {"as it is": [None] * len(masks), "corrected": masks}.items():
            difference = trainer_log_probs(model, rollouts, given) - drawn
            gap, ratio = difference.abs(), difference.exp().mean()
            print(f"{name:11s} {trainer:>9s} {len(drawn):6d} {gap.mean():9.1e} {gap.max():9.1e} {ratio:10.5f}", end="")
            print(f" {left:6.1f} {size:9.2f}", flush=True)


if __name__ == "__main__":
    main()
