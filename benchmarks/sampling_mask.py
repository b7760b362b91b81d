# SPDX-License-Identifier: Apache-2.0
"""How far is the trainer's log-probability from the one that a truncated rollout drew with, and what corrects it?

    python -m benchmarks.sampling_mask [--model smollm2-135m] [--rollout vllm|hf]

The engine's log-probability after top-p, top-k or min-p is log π_S, π renormalised over the tokens left. Printed for
each of these: |log π_S of the rollout − log π of the trainer| on average and at worst, and the mean of the ratio
π_trainer / π_S of the rollout, with the trainer as it is and with ``--sampling.correct_mask``; then the mean number of
tokens left, and the mask's bytes per token. Float32, so what is left with the correction is rounding. With
``--rollout hf`` Hugging Face's generate() draws instead of an engine: the same filters, in less memory.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from benchmarks.machine import describe
from ngrpo.models import resolve
from ngrpo.rollout.sampling_mask import SamplingMaskStore, pack
from perturbations import ReplayRecord
from tests.stack.harness import Rollout, build_engine, chat_prompts, sample_with_masks, trainer_log_probs

Draw = Callable[[dict[str, Any]], tuple[list[Rollout], list[Any]]]
TRUNCATED = {"top_p 0.95": {"top_p": 0.95}, "top_k 50": {"top_k": 50}, "min_p 0.05": {"min_p": 0.05}}
TOKENS, COPIES = 64, 2


def engine_rollouts(folder: str, _model: Any) -> Draw:
    """Draws by vLLM."""
    config = {"sampling_masks": True}
    llm = build_engine(folder, None, additional_config=config, logprobs_mode="processed_logprobs")
    prompts = chat_prompts(llm, copies=COPIES)
    return lambda params: sample_with_masks(llm, prompts, max_tokens=TOKENS, **params)


def generate_rollouts(folder: str, model: Any) -> Draw:
    """Draws by Hugging Face, one group of equal prompts at a time."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = chat_prompts(SimpleNamespace(get_tokenizer=lambda: tokenizer))
    none = np.zeros(0, dtype=np.int32)

    def draw(params: dict[str, Any]) -> tuple[list[Rollout], list[Any]]:
        rollouts, masks = [], []
        torch.manual_seed(0)
        for prompt in prompts:
            out = model.generate(
                torch.tensor([prompt] * COPIES),
                **{"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, **params},
                **{"min_new_tokens": None, "max_new_tokens": TOKENS, "eos_token_id": -1, "pad_token_id": 0},
                output_scores=True,
                return_dict_in_generate=True,
            )
            store = SamplingMaskStore(out.scores[0].shape[-1])
            for t, scores in enumerate(out.scores):
                places = [len(prompt) + t] * COPIES
                store.write(range(COPIES), places, *(part.numpy() for part in pack(scores)))
            length = len(prompt) + TOKENS
            record = ReplayRecord(
                0, len(prompt), length, none, none.reshape(0, 1), none.reshape(0, 1).astype("f4"), None, none > 0
            )
            for i, row in enumerate(out.sequences[:, len(prompt) :].tolist()):
                log_probs = [float(s[i].log_softmax(-1)[token]) for s, token in zip(out.scores, row)]
                rollouts.append(Rollout(prompt, row, record, np.array(log_probs, np.float32), log_probs))
                masks.append(store.read(i))
        return rollouts, masks

    return draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rollout", choices=("vllm", "hf"), default="vllm")
    options = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    warnings.simplefilter("ignore")
    folder = resolve(options.model)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    draw = (engine_rollouts if options.rollout == "vllm" else generate_rollouts)(folder, model)
    print(f"{describe()}; {options.model}, float32, temperature 1, rollouts by {options.rollout}")
    print(
        f"{'sampling':11s} {'trainer':>9s} {'tokens':>6s} {'mean gap':>9s} {'max gap':>9s} {'mean ratio':>10s}", end=""
    )
    print(f" {'left':>6s} {'bytes/tok':>9s}")
    for name, params in TRUNCATED.items():
        rollouts, masks = draw(params)
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
