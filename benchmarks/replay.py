# SPDX-License-Identifier: Apache-2.0
"""Time of a trainer's forward and backward with replay against without, interleaved in one process.

    python -m benchmarks.replay [--model smollm2-135m] [--pairs 7] [--batch 4] [--length 256]

Printed: the median of the paired ratios (replayed / plain, lower is better), and the range.
"""

import argparse
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.machine import describe
from benchmarks.pairs import summary
from ngrpo.machine.models.packaged import resolve
from perturbations import ReplayRecord, replaying

RECORDS = {"neighbor 0.1, k 3": (0.1, 3, False), "gumbel 1, k 5": (1.0, 5, False), "gaussian 1": (1.0, 1, True)}
"""Records as these leave them: rate, candidates, whether there is noise."""


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


class Trainer:
    """Steps of one model on one batch: log π of the tokens, backward, and the optimizer where there is one."""

    def __init__(
        self, model: Any, lengths: list[int], *, packed: bool = False, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """
        Args:
            model: a causal model.
            lengths: tokens of each sample; they are drawn at random.
            packed: one row without padding; positions begin again with each sample; the model's attention must
                keep them apart.
            optimizer: steps once a step.
        """
        self._model, self._optimizer, device = model, optimizer, model.device
        draws = torch.Generator().manual_seed(0)
        self.mask = (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(-1)).long()
        tokens = torch.randint(0, model.config.vocab_size, self.mask.shape, generator=draws) * self.mask
        targets = tokens.roll(-1, dims=1)
        weights = self.mask.roll(-1, dims=1) * self.mask
        weights[:, -1] = 0
        positions = torch.arange(max(lengths)).expand_as(tokens)
        parts = {"input_ids": tokens, "position_ids": positions, "targets": targets, "weights": weights}
        if packed:
            parts = {name: part[self.mask.bool()].unsqueeze(0) for name, part in parts.items()}
        self.mask = self.mask.to(device)
        self._inputs = {name: part.to(device) for name, part in parts.items()}
        self._targets, self._weights = self._inputs.pop("targets"), self._inputs.pop("weights")
        if not packed:
            self._inputs["attention_mask"] = self.mask

    def step(self, records: list[ReplayRecord] | None) -> tuple[float, float]:
        """One step, with the records replayed where there are any: seconds, and the mean of -log π."""
        self._model.zero_grad()
        self._wait()
        began = time.perf_counter()
        if records is None:
            loss = self._loss()
        else:
            with replaying(self._model, records, attention_mask=self.mask):
                loss = self._loss()
        loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()
        self._wait()
        return time.perf_counter() - began, loss.item()

    def _loss(self) -> Tensor:
        logits = self._model(**self._inputs, use_cache=False).logits.float()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), self._targets.flatten(), reduction="none")
        return (losses * self._weights.flatten()).sum() / self._weights.sum()

    def _wait(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()


def paired(trainer: Trainer, records: list[ReplayRecord], pairs: int) -> dict[str, float]:
    """Times steps without and with replay in turn, after one of each.

    Returns:
        ``plain_s``: the median without; ``ratio``, ``lowest``, ``highest``: with over without, median and range.
    """
    trainer.step(None), trainer.step(records)
    seconds = [(trainer.step(None)[0], trainer.step(records)[0]) for _ in range(pairs)]
    return summary(seconds, "plain_s")


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
    trainer = Trainer(model, [options.length] * options.batch)
    print(f"{describe()}; {options.model}, bfloat16, {options.batch} x {options.length} tokens")
    print(f"{'record':22s} {'plain s':>8s} {'ratio':>7s}  range")
    for label, (rate, k, noisy) in RECORDS.items():
        sizes = (options.length, rate, k, model.config.vocab_size)
        cost = paired(trainer, [random_record(*sizes, i, noisy) for i in range(options.batch)], options.pairs)
        print(
            f"{label:22s} {cost['plain_s']:8.2f} {cost['ratio']:7.3f}  {cost['lowest']:.3f}-{cost['highest']:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
