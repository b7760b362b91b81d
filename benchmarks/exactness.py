# SPDX-License-Identifier: Apache-2.0
"""How exact is the replay? Rollouts of real vLLM against a Hugging Face forward, both in float32.

    python -m benchmarks.exactness [--model smollm2-135m] [--perturbations neighbor,gumbel]

Printed for every perturbation at rates 0.1 and 1, over about 1,300 tokens each: |Δ log p| at worst and on average with
the replay, at worst without it, and the record's size. The tests hold the first two below 1e-4 and 1e-5.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from benchmarks.command_line import add_model, add_perturbations, in_tree, parser_of
from benchmarks.machine import describe
from ngrpo.machine.models.packaged import resolve
from ngrpo.rollout import set_perturbation
from perturbations import create, parameters
from tests.stack.harness import build_engine, chat_prompts, gaps, sample

# An untrained router feeds the token itself nearly everywhere, so that a replay would show nothing.
_OPTIONS: dict[str, dict[str, Any]] = {"tarpo": {"bias": 0.0}}
_RATES = (0.1, 1.0)
_TOKENS = 80  # of each response


def measure(llm: Any, model: Any, prompts: list[list[int]], name: str, rate: float, tokens: int) -> dict[str, Any]:
    """Samples with a perturbation and replays.

    Args:
        llm: an engine with a perturbation, which is replaced.
        model: the Hugging Face model with the same weights.
        prompts: token ids.
        name: of the perturbation.
        rate: of the perturbation.
        tokens: generated for each prompt.

    Returns:
        ``max``, ``mean``: |Δ log p| with the replay; ``unreplayed``: at worst without it; ``tokens``, ``edits``, and
        the record's ``bytes`` a token.
    """
    options = _OPTIONS.get(name, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_perturbation(llm, name, rate=rate, **options)
        perturbation = create(name, rate=rate, **options)
    seeds = [{"seed": number} for number in range(len(prompts))]
    with _with_parameters(model, perturbation):
        rollouts = sample(llm, prompts, seeds, max_tokens=tokens)
        replayed_gaps = gaps(model, rollouts)
        unreplayed_gaps = gaps(model, rollouts, replay=False)
    record_bytes = sum(len(rollout.record.to_bytes()) for rollout in rollouts)
    return {
        "perturbation": name,
        "rate": rate,
        "tokens": len(replayed_gaps),
        "edits": sum(len(rollout.record) for rollout in rollouts),
        "max": replayed_gaps.max().item(),
        "mean": replayed_gaps.mean().item(),
        "unreplayed": unreplayed_gaps.max().item(),
        "bytes": record_bytes / len(replayed_gaps),
    }


@contextmanager
def _with_parameters(model: Any, perturbation: Any) -> Iterator[None]:
    """Puts the module of a perturbation with parameters next to the model, as in training."""
    learned = parameters.attach(model, perturbation)
    try:
        yield
    finally:
        if learned is not None:
            delattr(model, parameters.NAME)


def main() -> None:
    parser = parser_of(__doc__)
    add_model(parser)
    add_perturbations(parser, in_tree())
    options = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    warnings.simplefilter("ignore")
    folder = resolve(options.model)
    llm = build_engine(folder, {"name": "gumbel"}, max_num_batched_tokens=64, enable_prefix_caching=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = chat_prompts(llm, copies=4)
    print(f"{describe()}; {options.model}, float32, chunked prefill, prefix caching")
    print(f"{'name':10s} {'rate':>5s} {'tokens':>6s} {'max':>8s} {'mean':>8s} {'unreplayed':>10s} {'bytes/tok':>10s}")
    for name in options.perturbations:
        for rate in _RATES:
            _print_row(measure(llm, model, prompts, name, rate, _TOKENS))


def _print_row(row: dict[str, Any]) -> None:
    label = f"{row['perturbation']:10s} {row['rate']:5g} {row['tokens']:6d}"
    gap_cells = f"{row['max']:8.1e} {row['mean']:8.1e} {row['unreplayed']:10.2f}"
    print(f"{label} {gap_cells} {row['bytes']:10.2f}", flush=True)


if __name__ == "__main__":
    main()
