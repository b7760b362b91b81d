# SPDX-License-Identifier: Apache-2.0
"""Time of a trainer's forward and backward with replay against without, interleaved in one process.

    python -m benchmarks.replay [--model smollm2-135m] [--pairs 7] [--batch 4] [--length 256]

Printed: the median of the paired ratios (replayed / plain, lower is better), and the range.
"""

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.command_line import add_model, parser_of
from benchmarks.machine import describe
from benchmarks.pairs import ratio_and_range, summary
from ngrpo.machine.models.packaged import resolve
from perturbations import ReplayRecord, replaying


class RecordKind(NamedTuple):
    """The size of the records that a perturbation leaves.

    Attributes:
        rate: share of positions with an edit.
        candidates: of an edit.
        noisy: whether an edit has noise.
    """

    rate: float
    candidates: int
    noisy: bool


RECORDS = {
    "neighbor 0.1, k 3": RecordKind(rate=0.1, candidates=3, noisy=False),
    "gumbel 1, k 5": RecordKind(rate=1.0, candidates=5, noisy=False),
    "gaussian 1": RecordKind(rate=1.0, candidates=1, noisy=True),
}


def random_record(length: int, kind: RecordKind, vocabulary: int, seed: int) -> ReplayRecord:
    """A record of the size that a rollout of ``length`` tokens leaves, with candidates drawn at random."""
    draws = np.random.default_rng(seed)
    positions = np.flatnonzero(draws.random(length) < kind.rate).astype(np.int32)
    edits = len(positions)
    weights = draws.random((edits, kind.candidates)).astype(np.float32)
    ids = draws.integers(0, vocabulary, (edits, kind.candidates), dtype=np.int32)
    sigma = np.full(edits, 0.03, np.float32) if kind.noisy else None
    return ReplayRecord(
        seed=seed,
        prompt_tokens=0,
        num_tokens=length,
        positions=positions,
        ids=ids,
        weights=weights / weights.sum(-1, keepdims=True),
        sigma=sigma,
        agreed=np.ones(edits, dtype=bool),
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
        self._model = model
        self._optimizer = optimizer
        draws = torch.Generator().manual_seed(0)
        columns = torch.arange(max(lengths))
        mask = (columns < torch.tensor(lengths).unsqueeze(-1)).long()
        tokens = torch.randint(0, model.config.vocab_size, mask.shape, generator=draws) * mask
        weights = mask.roll(-1, dims=1) * mask
        weights[:, -1] = 0
        tensors = {
            "input_ids": tokens,
            "position_ids": columns.expand_as(tokens),
            "targets": tokens.roll(-1, dims=1),
            "weights": weights,
        }
        if packed:
            tensors = {name: tensor[mask.bool()].unsqueeze(0) for name, tensor in tensors.items()}
        self.mask = mask.to(model.device)
        self._inputs = {name: tensor.to(model.device) for name, tensor in tensors.items()}
        self._targets = self._inputs.pop("targets")
        self._weights = self._inputs.pop("weights")
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
    trainer.step(None)
    trainer.step(records)
    seconds = []
    for _ in range(pairs):
        plain_seconds, _ = trainer.step(None)
        replayed_seconds, _ = trainer.step(records)
        seconds.append((plain_seconds, replayed_seconds))
    return summary(seconds, "plain_s")


def main() -> None:
    parser = parser_of(__doc__)
    add_model(parser)
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
    for label, kind in RECORDS.items():
        records = [random_record(options.length, kind, model.config.vocab_size, seed) for seed in range(options.batch)]
        figures = paired(trainer, records, options.pairs)
        print(f"{label:22s} {figures['plain_s']:8.2f} {ratio_and_range(figures)}", flush=True)


if __name__ == "__main__":
    main()
