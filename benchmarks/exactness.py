"""How exact is the replay? Rollouts of real vLLM against a Hugging Face forward, both in float32.

    python -m benchmarks.exactness [--model smollm2-135m]

Printed for every perturbation at rates 0.1 and 1, over about 1,300 tokens each: |Δ log p| at worst and on average with
the replay, at worst without it, and the record's size. The tests hold the first two below 1e-4 and 1e-5.
"""

from __future__ import annotations

import argparse
import os
import warnings

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from benchmarks.machine import describe
from ngrpo.models import resolve
from ngrpo.rollout import set_perturbation
from perturbations import available
from tests.stack.harness import build_engine, chat_prompts, gaps, sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    warnings.simplefilter("ignore")
    folder = resolve(options.model)
    llm = build_engine(folder, {"name": "gumbel"}, max_num_batched_tokens=64, enable_prefix_caching=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    print(f"{describe()}; {options.model}, float32, chunked prefill, prefix caching")
    print(f"{'name':10s} {'rate':>5s} {'tokens':>6s} {'max':>8s} {'mean':>8s} {'unreplayed':>10s} {'bytes/tok':>10s}")
    names = [n for n, source in available().items() if source.startswith("perturbations.") and n != "none"]
    for name in names:
        for rate in (0.1, 1.0):
            set_perturbation(llm, name, rate=rate)
            rollouts = sample(llm, chat_prompts(llm, copies=4), max_tokens=80)
            gap, without = gaps(model, rollouts), gaps(model, rollouts, replay=False)
            size = sum(len(r.record.to_bytes()) for r in rollouts) / len(gap)
            figures = f"{len(gap):6d} {gap.max():8.1e} {gap.mean():8.1e} {without.max():10.2f} {size:10.2f}"
            print(f"{name:10s} {rate:5g} {figures}", flush=True)


if __name__ == "__main__":
    main()
