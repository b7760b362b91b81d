# SPDX-License-Identifier: Apache-2.0
"""How far is the trainer's log-probability from the one that a truncated rollout drew with, and what corrects it?

    python -m benchmarks.sampling_mask [--model smollm2-135m] [--rollout vllm|hf] [--cost]

The engine's log-probability after top-p, top-k or min-p is log π_S, π renormalised over the tokens left. Printed for
each of these: |log π_S of the rollout − log π of the trainer| on average and at worst, and the mean of the ratio
π_trainer / π_S of the rollout, with the trainer as it is and with ``--sampling.correct_mask``; then the mean number of
tokens left, and the mask's bytes per token. Float32, so what is left with the correction is rounding. With
``--rollout hf`` Hugging Face's generate() draws instead of an engine: the same filters, in less memory.

``--cost`` measures instead what recording costs the host of a large engine, without the copies themselves: milliseconds
of a step, megabytes that come from the device, and memory by position, with 40 tokens left of 151,936; then what the
bytes of a finished trajectory cost. `bits`: a bit for each token is copied, and the host looks for the set ones
and keeps their ids in arrays. `ids`: what the rollout does, which picks them out on the device.
"""

import argparse
import os
import statistics
import time
import tracemalloc
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from benchmarks.machine import describe
from ngrpo.machine.models.packaged import resolve
from ngrpo.rollout.sampling_support import SamplingMaskStore, SamplingSupport
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
            store = SamplingMaskStore(out.scores[0].shape[-1], COPIES)
            for t, scores in enumerate(out.scores):
                left = SamplingSupport(scores, lambda part: part)
                left.ask()
                store.write(range(COPIES), [len(prompt) + t] * COPIES, *left.read(None))
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


def _of_bits(bits: np.ndarray, size: int) -> list[np.ndarray]:
    """The ids of the set bits in each row, (B, ⌈V/8⌉): eight bytes at once, of which nearly all are 0."""
    words = np.zeros((len(bits), -(-bits.shape[1] // 8)), dtype=np.uint64)
    words.view(np.uint8)[:, : bits.shape[1]] = bits
    rows, places = np.nonzero(words)
    octets = words.view(np.uint8).reshape(*words.shape, 8)[rows, places]
    which, bit = np.nonzero(np.unpackbits(octets, axis=1, bitorder="little"))
    return np.split(64 * places[which] + bit, np.searchsorted(rows[which], np.arange(1, len(bits))))


def _traced(act: Callable[..., None], *args: Any) -> int:
    """Bytes that something leaves allocated."""
    tracemalloc.start()
    act(*args)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken


def _milliseconds(act: Callable[..., Any], *args: Any) -> float:
    """Of one core."""
    began = time.thread_time()
    act(*args)
    return 1e3 * (time.thread_time() - began)


def print_cost(size: int = 151_936, left: int = 40, steps: int = 400) -> None:
    """Prints what a step's recording costs the host."""
    print(f"{describe()}; {left} of {size} tokens left")
    print(f"{'rows':>5s} recorded  ms/step copied MB bytes/position ms/1,000 positions")
    for rows in (128, 1024):
        _print_cost(rows, size, left, steps)


def _print_cost(rows: int, size: int, left: int, steps: int) -> None:
    draws, mask = np.random.default_rng(0), np.zeros((rows, size), dtype=bool)
    for row in mask:
        row[draws.choice(size, left, replace=False)] = True
    bits, counts = np.packbits(mask, axis=1, bitorder="little"), np.full(rows, left)
    ids = np.nonzero(mask)[1].astype(np.int32)
    del mask
    held: dict[int, dict[int, tuple[bool, np.ndarray]]] = {row: {} for row in range(rows)}
    store, slots = SamplingMaskStore(size, rows), np.arange(rows)

    def keep(position: int) -> None:
        for row, tokens in enumerate(_of_bits(bits, size)):
            held[row][position] = False, tokens

    times = [_milliseconds(keep, position) for position in range(12)]
    taken = _traced(keep, 12) / rows
    print(f"{rows:5d} bits     {statistics.median(times):8.2f} {bits.nbytes / 1e6:9.2f} {taken:14.1f}", flush=True)
    times = [_milliseconds(store.write, slots, np.full(rows, at), counts, ids) for at in range(steps)]
    assert store.read(rows - 1).left()[7].tolist() == held[rows - 1][7][1].tolist()
    packed = _milliseconds(lambda: store.read(0).to_bytes()) * 1000 / steps
    print(f"{rows:5d} ids      {statistics.median(times):8.2f} {(ids.nbytes + counts.nbytes) / 1e6:9.2f}", end=" ")
    print(f"{store.bytes / (rows * steps):14.1f} {packed:18.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rollout", choices=("vllm", "hf"), default="vllm")
    parser.add_argument("--cost", action="store_true", help="what recording costs the host of a large engine")
    options = parser.parse_args()
    if options.cost:
        print_cost()
        return
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
        log_probs = torch.tensor([lp for rollout in rollouts for lp in rollout.engine_log_probs])
        left = sum(len(ids) for mask in masks for ids in mask.left()) / max(sum(map(len, masks)), 1)
        size = sum(len(mask.to_bytes()) for mask in masks) / len(log_probs)
        for trainer, row_masks in {"as it is": [None] * len(masks), "corrected": masks}.items():
            difference = trainer_log_probs(model, rollouts, row_masks) - log_probs
            gap, ratio = difference.abs(), difference.exp().mean()
            print(
                f"{name:11s} {trainer:>9s} {len(log_probs):6d} {gap.mean():9.1e} {gap.max():9.1e} {ratio:10.5f}", end=""
            )
            print(f" {left:6.1f} {size:9.2f}", flush=True)


if __name__ == "__main__":
    main()
