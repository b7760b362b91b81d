# SPDX-License-Identifier: Apache-2.0
"""How exact is the replay? Rollouts of real vLLM against a Hugging Face forward, both in float32.

    python -m benchmarks.exactness [--model smollm2-135m] [--perturbations neighbor,gumbel]

Printed for every perturbation at rates 0.1 and 1, over about 1,300 tokens each: |Δ log p| at worst and on average with
the replay, at worst without it, and the record's size. The tests hold the first two below 1e-4 and 1e-5.
"""

import argparse
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from benchmarks.machine import describe
from ngrpo.machine.models.packaged import resolve
from ngrpo.rollout import set_perturbation
from perturbations import available, create, parameters
from tests.stack.harness import build_engine, chat_prompts, gaps, sample

# An untrained router feeds the token itself nearly everywhere, so that a replay would show nothing.
_OPTIONS: dict[str, dict[str, Any]] = {"tarpo": {"bias": 0.0}}


def in_tree() -> list[str]:
    """The perturbations of the tree that perturb."""
    return [name for name, source in available().items() if source.startswith("perturbations.") and name != "none"]


def measure(llm: Any, model: Any, prompts: list[list[int]], name: str, rate: float, tokens: int) -> dict[str, Any]:
    """Samples with a perturbation and replays.

    Args:
        llm: an engine with a perturbation, which is replaced.
        model: the Hugging Face model with the same weights.
        prompts: token ids.
        name, rate: the perturbation.
        tokens: generated for each prompt.

    Returns:
        ``max``, ``mean``: |Δ log p| with the replay; ``unreplayed``: at worst without it; ``tokens``, ``edits``, and
        the record's ``bytes`` a token.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_perturbation(llm, name, rate=rate, **_OPTIONS.get(name, {}))
        perturbation = create(name, rate=rate, **_OPTIONS.get(name, {}))
    with _with_parameters(model, perturbation):
        rollouts = sample(llm, prompts, [{"seed": i} for i in range(len(prompts))], max_tokens=tokens)
        gap, without = gaps(model, rollouts), gaps(model, rollouts, replay=False)
    return {
        "perturbation": name,
        "rate": rate,
        "tokens": len(gap),
        "edits": sum(len(r.record) for r in rollouts),
        "max": gap.max().item(),
        "mean": gap.mean().item(),
        "unreplayed": without.max().item(),
        "bytes": sum(len(r.record.to_bytes()) for r in rollouts) / len(gap),
    }


@contextmanager
def _with_parameters(model: Any, perturbation: Any) -> Iterator[None]:
    """A perturbation with parameters has its module next to the model, as in training."""
    learned = parameters.attach(model, perturbation)
    try:
        yield
    finally:
        if learned is not None:
            delattr(model, parameters.NAME)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--perturbations", default=None, help="separated by commas; all by default")
    options = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    warnings.simplefilter("ignore")
    folder = resolve(options.model)
    llm = build_engine(folder, {"name": "gumbel"}, max_num_batched_tokens=64, enable_prefix_caching=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    print(f"{describe()}; {options.model}, float32, chunked prefill, prefix caching")
    print(f"{'name':10s} {'rate':>5s} {'tokens':>6s} {'max':>8s} {'mean':>8s} {'unreplayed':>10s} {'bytes/tok':>10s}")
    for name in options.perturbations.split(",") if options.perturbations else in_tree():
        for rate in (0.1, 1.0):
            row = measure(llm, model, chat_prompts(llm, copies=4), name, rate, 80)
            figures = f"{row['tokens']:6d} {row['max']:8.1e} {row['mean']:8.1e} {row['unreplayed']:10.2f}"
            print(f"{name:10s} {rate:5g} {figures} {row['bytes']:10.2f}", flush=True)


if __name__ == "__main__":
    main()
