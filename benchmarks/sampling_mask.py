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

from benchmarks.command_line import add_model, parser_of
from benchmarks.machine import describe
from ngrpo.machine.models.packaged import resolve
from ngrpo.rollout.sampling_support import SamplingMaskStore, SamplingSupport
from tests.stack.harness import Rollout, build_engine, chat_prompts, sample_with_masks, trainer_log_probs
from tests.support.replay_examples import a_record

Draw = Callable[[dict[str, Any]], tuple[list[Rollout], list[Any]]]
TRUNCATED = {"top_p 0.95": {"top_p": 0.95}, "top_k 50": {"top_k": 50}, "min_p 0.05": {"min_p": 0.05}}
TOKENS = 64  # of a response
COPIES = 2  # responses to a prompt


def engine_rollouts(folder: str, _model: Any) -> Draw:
    """Draws by vLLM."""
    llm = build_engine(folder, None, additional_config={"sampling_masks": True}, logprobs_mode="processed_logprobs")
    prompts = chat_prompts(llm, copies=COPIES)
    return lambda params: sample_with_masks(llm, prompts, max_tokens=TOKENS, **params)


def generate_rollouts(folder: str, model: Any) -> Draw:
    """Draws by Hugging Face, one group of equal prompts at a time."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = chat_prompts(SimpleNamespace(get_tokenizer=lambda: tokenizer))

    def draw(params: dict[str, Any]) -> tuple[list[Rollout], list[Any]]:
        rollouts = []
        masks = []
        torch.manual_seed(0)
        for prompt in prompts:
            sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, **params}
            output = model.generate(
                torch.tensor([prompt] * COPIES),
                **sampling,
                min_new_tokens=None,
                max_new_tokens=TOKENS,
                eos_token_id=-1,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
            store = _tokens_left(output.scores, len(prompt))
            record = a_record(0, 1, prompt_tokens=len(prompt), num_tokens=len(prompt) + TOKENS)
            responses = output.sequences[:, len(prompt) :].tolist()
            for row, response in enumerate(responses):
                log_probs = []
                for scores, token in zip(output.scores, response):
                    log_probs.append(float(scores[row].log_softmax(-1)[token]))
                rollouts.append(Rollout(prompt, response, record, np.array(log_probs, np.float32), log_probs))
                masks.append(store.read(row))
        return rollouts, masks

    return draw


def _tokens_left(step_scores: Any, prompt_tokens: int) -> SamplingMaskStore:
    """The tokens that filters left in each step of generate(), whose scores are (COPIES, V)."""
    store = SamplingMaskStore(step_scores[0].shape[-1], COPIES)
    for step, scores in enumerate(step_scores):
        support = SamplingSupport(scores, lambda tensor: tensor)
        support.send_ids()
        store.write(range(COPIES), [prompt_tokens + step] * COPIES, *support.read(None))
    return store


def _ids_of_bits(bits: np.ndarray) -> list[np.ndarray]:
    """The ids of the set bits in each row, (B, ⌈V/8⌉): eight bytes at once, of which nearly all are 0."""
    words = np.zeros((len(bits), -(-bits.shape[1] // 8)), dtype=np.uint64)
    words.view(np.uint8)[:, : bits.shape[1]] = bits
    rows, columns = np.nonzero(words)
    octets = words.view(np.uint8).reshape(*words.shape, 8)[rows, columns]
    word, bit = np.nonzero(np.unpackbits(octets, axis=1, bitorder="little"))
    first_of_rows = np.searchsorted(rows[word], np.arange(1, len(bits)))
    return np.split(64 * columns[word] + bit, first_of_rows)


def _allocated(act: Callable[..., None], *args: Any) -> int:
    """Bytes that a call leaves allocated."""
    tracemalloc.start()
    act(*args)
    allocated, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return allocated


def _milliseconds(act: Callable[..., Any], *args: Any) -> float:
    """Milliseconds of one core that a call takes."""
    began = time.thread_time()
    act(*args)
    return 1e3 * (time.thread_time() - began)


def print_cost(vocabulary: int = 151_936, left: int = 40, steps: int = 400) -> None:
    """Prints what a step's recording costs the host."""
    print(f"{describe()}; {left} of {vocabulary} tokens left")
    print(f"{'rows':>5s} recorded  ms/step copied MB bytes/position ms/1,000 positions")
    for rows in (128, 1024):
        _print_cost(rows, vocabulary, left, steps)


def _print_cost(rows: int, vocabulary: int, left: int, steps: int) -> None:
    draws = np.random.default_rng(0)
    mask = np.zeros((rows, vocabulary), dtype=bool)
    for row in mask:
        row[draws.choice(vocabulary, left, replace=False)] = True
    bits = np.packbits(mask, axis=1, bitorder="little")
    counts = np.full(rows, left)
    ids = np.nonzero(mask)[1].astype(np.int32)
    del mask

    # `bits`: the host finds the ids and keeps an array for each row and position.
    kept: dict[int, dict[int, tuple[bool, np.ndarray]]] = {row: {} for row in range(rows)}

    def keep(position: int) -> None:
        for row, tokens in enumerate(_ids_of_bits(bits)):
            kept[row][position] = False, tokens

    times = [_milliseconds(keep, position) for position in range(12)]
    bytes_per_position = _allocated(keep, 12) / rows
    copied = bits.nbytes / 1e6
    print(f"{rows:5d} bits     {statistics.median(times):8.2f} {copied:9.2f} {bytes_per_position:14.1f}", flush=True)

    # `ids`: the ids arrive as they are, and the store keeps them.
    store = SamplingMaskStore(vocabulary, rows)
    slots = np.arange(rows)
    times = [_milliseconds(store.write, slots, np.full(rows, position), counts, ids) for position in range(steps)]
    assert store.read(rows - 1).left()[7].tolist() == kept[rows - 1][7][1].tolist()
    packing = _milliseconds(lambda: store.read(0).to_bytes()) * 1000 / steps
    copied = (ids.nbytes + counts.nbytes) / 1e6
    bytes_per_position = store.bytes / (rows * steps)
    memory_cells = f"{copied:9.2f} {bytes_per_position:14.1f}"
    print(f"{rows:5d} ids      {statistics.median(times):8.2f} {memory_cells} {packing:18.2f}", flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    add_model(parser)
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
    make_draw = engine_rollouts if options.rollout == "vllm" else generate_rollouts
    draw = make_draw(folder, model)
    print(f"{describe()}; {options.model}, float32, temperature 1, rollouts by {options.rollout}")
    gap_headings = f"{'mean gap':>9s} {'max gap':>9s} {'mean ratio':>10s}"
    print(f"{'sampling':11s} {'trainer':>9s} {'tokens':>6s} {gap_headings} {'left':>6s} {'bytes/tok':>9s}")
    for name, params in TRUNCATED.items():
        rollouts, masks = draw(params)
        _print_rows(name, model, rollouts, masks)


def _print_rows(name: str, model: Any, rollouts: list[Rollout], masks: list[Any]) -> None:
    """The trainer as it is, then with the correction."""
    import torch

    log_probs = torch.tensor([log_prob for rollout in rollouts for log_prob in rollout.engine_log_probs])
    tokens_left = sum(len(ids) for mask in masks for ids in mask.left())
    mean_left = tokens_left / max(sum(len(mask) for mask in masks), 1)
    bytes_per_token = sum(len(mask.to_bytes()) for mask in masks) / len(log_probs)
    for trainer, trainer_masks in (("as it is", [None] * len(masks)), ("corrected", masks)):
        difference = trainer_log_probs(model, rollouts, trainer_masks) - log_probs
        gap = difference.abs()
        gap_cells = f"{gap.mean():9.1e} {gap.max():9.1e} {difference.exp().mean():10.5f}"
        label = f"{name:11s} {trainer:>9s} {len(log_probs):6d}"
        print(f"{label} {gap_cells} {mean_left:6.1f} {bytes_per_token:9.2f}", flush=True)


if __name__ == "__main__":
    main()
