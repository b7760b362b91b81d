# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.lora_mismatch [MODEL]``: what LoRA's merge costs in bfloat16, and its half of a weight sync.

The engine's side is a transformers model with the merged weights, so that the differences are the merge's and not the
engine's kernels'. With bitsandbytes installed, QLoRA is measured too. The tables of docs/models.md and docs/training.md
are printed.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ngrpo.machine.models import four_bit, lora, packaged

TEXTS = [
    "The quick brown fox jumps over the lazy dog and then runs away from the farmer who",
    "What is 17 + 25? Let us compute: 17 + 25 = 42. The answer is 42. Next, what is 3 times 9?",
    "Rain falls on the hills, gathers in streams, and reaches the sea after many days.",
    "A prime number has exactly two divisors: 2, 3, 5, 7 and 11 are the first five of them.",
]
RANK = 16
REPEATS = 3
DTYPE = torch.bfloat16


def load(folder: str, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": DTYPE, **options}).eval()


def trainer(folder: str, *, in_four_bit: bool = False) -> Any:
    """The model that OpenRLHF trains, with adapters on all linear layers; their B is not zero, as after training."""
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig

    options: dict[str, Any] = {}
    if in_four_bit:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=DTYPE,
        )
    base = load(folder, **options)
    four_bit.prepare(base)
    settings = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    model = get_peft_model(base, settings).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.data = (0.04 * torch.randn(parameter.shape, generator=generator)).to(DTYPE)
        elif "lora_B" in name:
            parameter.data = (0.02 * torch.randn(parameter.shape, generator=generator)).to(DTYPE)
    return model


def engine_of(folder: str, weights: dict[str, Tensor]) -> Any:
    """The base model with an engine's weights."""
    engine = load(folder)
    engine.load_state_dict(weights, strict=False)
    return engine


def merged(model: Any) -> dict[str, Tensor]:
    return {weight.name: weight.merged() for weight in lora.engine_weights(model)}


def on_the_checkpoint(folder: str, model: Any) -> dict[str, Tensor]:
    """The adapters of a QLoRA model merged into the checkpoint's own weights."""
    checkpoint = dict(load(folder).named_parameters())
    return {
        weight.name: (checkpoint[weight.name].detach().float() + lora.update_of(weight.adapter)).to(DTYPE)
        for weight in lora.engine_weights(model)
        if weight.adapter is not None
    }


def tokens_of(folder: str) -> list[Tensor]:
    """The tokens of each text, (1, T)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text, return_tensors="pt").input_ids for text in TEXTS]


@torch.no_grad()
def log_probs(model: Any, sequences: list[Tensor]) -> Tensor:
    """Of all tokens after the first of each text, one after the other."""
    values = []
    for sequence in sequences:
        logits = model(sequence).logits[0, :-1].float().log_softmax(-1)
        values.append(logits.gather(-1, sequence[0, 1:, None])[:, 0])
    return torch.cat(values)


def row(name: str, one: Tensor, other: Tensor) -> str:
    difference = (one - other).abs()
    return f"| {name} | {difference.mean():.1e} | {difference.max():.1e} |"


def mismatches(folder: str) -> Iterator[str]:
    """Mean and largest |Δ log p| between two sides, as rows of a table."""
    from transformers.utils import is_bitsandbytes_available

    sequences = tokens_of(folder)
    model = trainer(folder)
    beside = log_probs(model, sequences)
    in_merged = log_probs(engine_of(folder, merged(model)), sequences)
    exact = log_probs(model.float(), sequences)
    yield row("LoRA: merged weights, trainer", in_merged, beside)
    yield row("LoRA: merged weights, trainer in float32", in_merged, exact)
    yield row("LoRA: adapters beside the weights, trainer in float32", beside, exact)
    if is_bitsandbytes_available():
        model = trainer(folder, in_four_bit=True)
        of_trainer = log_probs(model, sequences)
        dequantised = log_probs(engine_of(folder, merged(model)), sequences)
        yield row("QLoRA: merged dequantised weights, trainer", dequantised, of_trainer)
        checkpoint = log_probs(engine_of(folder, on_the_checkpoint(folder, model)), sequences)
        yield row("QLoRA: adapters merged into the checkpoint, trainer", checkpoint, of_trainer)


def sync_costs(folder: str) -> list[str]:
    """Bytes and the trainer's seconds of a sync, in float32; in turns, so that the machine's other load meets both."""
    from safetensors.torch import save_file

    model = trainer(folder).float()
    durations: dict[str, list[float]] = {"full training": [], "LoRA": []}
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "weights.safetensors"
        for _ in range(REPEATS):
            for name, measured in durations.items():
                started = time.perf_counter()
                base = {weight: tensor.detach() for weight, tensor in lora.base_parameters(model).items()}
                save_file(merged(model) if name == "LoRA" else base, path)
                measured.append(time.perf_counter() - started)
        size = path.stat().st_size / 1e6
    changed = sum(weight.merged().nbytes for weight in lora.changed_weights(model)) / 1e6
    rows = [f"| {name}, by file | {size:.0f} MB | {median(measured):.2f} s |" for name, measured in durations.items()]
    return [*rows, f"| LoRA, between GPUs | {changed:.0f} MB | – |"]


def main(name: str) -> None:
    folder = packaged.resolve(name)
    print("| weight sync | sent | trainer's part |\n| --- | --- | --- |")
    print("\n".join(sync_costs(folder)), flush=True)
    print("\n| sides | mean | largest |\n| --- | --- | --- |", flush=True)
    for line in mismatches(folder):
        print(line, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:] or ["smollm2-135m"])
