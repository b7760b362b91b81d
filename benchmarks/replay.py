"""Time of a trainer's forward and backward with replay against without, interleaved in one process.

    python -m benchmarks.replay [--model smollm2-135m] [--pairs 7] [--batch 4] [--length 256]

Printed: the median of the paired ratios (replayed / plain, lower is better), and the range.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from benchmarks.machine import describe
from ngrpo.models import resolve
from perturbations import ReplayRecord, replaying


def random_record(length: int, rate: float, k: int, vocabulary: int, seed: int, noisy: bool) -> ReplayRecord:
    """A record of the size that a rollout leaves, with candidates drawn at random."""
    draws = np.random.default_rng(seed)
    positions = np.flatnonzero(draws.random(length) < rate).astype(np.int32)
    weights = draws.random((len(positions), k)).astype(np.float32)
    return ReplayRecord(
        seed,
        0,
        length,
        positions,
        draws.integers(0, vocabulary, (len(positions), k), dtype=np.int32),
        weights / weights.sum(-1, keepdims=True),
        np.full(len(positions), 0.03, np.float32) if noisy else None,
        np.ones(len(positions), dtype=bool),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(resolve(options.model), dtype=torch.bfloat16).to(device)
    vocabulary = model.config.vocab_size
    tokens = torch.randint(0, vocabulary, (options.batch, options.length), device=device)
    mask = torch.ones_like(tokens)

    def step(records: list[ReplayRecord] | None) -> float:
        model.zero_grad()
        began = time.perf_counter()
        if records is None:
            loss = model(tokens, attention_mask=mask, labels=tokens).loss
        else:
            with replaying(model, records, attention_mask=mask):
                loss = model(tokens, attention_mask=mask, labels=tokens).loss
        loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    print(f"{describe()}; {options.model}, bfloat16, {options.batch} x {options.length} tokens")
    print(f"{'record':22s} {'plain s':>8s} {'ratio':>7s}  range")
    cases = [("neighbor 0.1, k 3", 0.1, 3, False), ("gumbel 1, k 5", 1.0, 5, False), ("gaussian 1", 1.0, 1, True)]
    for label, rate, k, noisy in cases:
        records = [random_record(options.length, rate, k, vocabulary, i, noisy) for i in range(options.batch)]
        step(None), step(records)
        pairs = [(step(None), step(records)) for _ in range(options.pairs)]
        ratios = [ours / plain for plain, ours in pairs]
        plain = statistics.median(seconds for seconds, _ in pairs)
        print(
            f"{label:22s} {plain:8.2f} {statistics.median(ratios):7.3f}  {min(ratios):.3f}-{max(ratios):.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
