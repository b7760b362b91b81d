# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.lora_mismatch [MODEL]``: what a merge costs in bfloat16, and a weight sync with LoRA.

One engine has merged weights and another one applies the adapter beside the base model's weights. Both roll out, and
PEFT's model computes the log-probabilities of the rolled-out tokens. With bitsandbytes installed, QLoRA is measured
too. The tables of docs/models.md and docs/training.md are printed.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ngrpo.machine.models import four_bit, lora, packaged
from ngrpo.trainers.common.weights_file import load_weights_file

QUESTIONS = [f"Add {number} and {3 * number}, step by step." for number in range(7, 15)]
TOKENS = 48
RANK = 16
REPEATS = 3
DTYPE = torch.bfloat16


def trainer(folder: str, *, in_four_bit: bool = False) -> Any:
    """The model that OpenRLHF trains, with adapters on all linear layers; their B is not zero, as after training."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {"dtype": DTYPE}
    if in_four_bit:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=DTYPE,
        )
    base = AutoModelForCausalLM.from_pretrained(folder, **options)
    four_bit.prepare(base)
    settings = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    model = get_peft_model(base, settings).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = (0.01 * torch.randn(parameter.shape, generator=generator)).to(DTYPE)
        elif parameter.is_floating_point():
            parameter.data = parameter.data.to(DTYPE)
    return model


def engine_of(folder: str, **options: Any) -> Any:
    """An engine in this process, so that a weight sync can call a function in its worker."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    settings = {"max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 27, "enforce_eager": True}
    return LLM(folder, dtype="bfloat16", distributed_executor_backend="uni", **settings, **options)


def send(engine: Any, weights: dict[str, torch.Tensor], folder: Path) -> int:
    """Sends weights by a file, as a training on a CPU does; returns their bytes."""
    from safetensors.torch import save_file

    path = folder / "weights.safetensors"
    save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, path)
    engine.llm_engine.collective_rpc(load_weights_file, args=(str(path),))
    engine.reset_prefix_cache()
    return path.stat().st_size


def merged(model: Any) -> dict[str, torch.Tensor]:
    return {weight.name: weight.merged() for weight in lora.engine_weights(model)}


def on_whole_weights(folder: str, model: Any) -> dict[str, torch.Tensor]:
    """The adapters of a QLoRA model on the checkpoint's own weights."""
    from transformers import AutoModelForCausalLM

    whole = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE).named_parameters())
    weights = {}
    for weight in lora.engine_weights(model):
        base = whole[weight.name].detach()
        weights[weight.name] = base
        if weight.adapter is not None:
            weights[weight.name] = (base.float() + lora.update_of(weight.adapter)).to(DTYPE)
    return weights


@torch.no_grad()
def mismatch(engine: Any, model: Any, adapter: Any = None) -> str:
    """Mean and largest |Δ log p| of a rollout between an engine and the trainer's model, as cells of a table."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, seed=1)
    outputs = engine.generate(QUESTIONS, sampling, use_tqdm=False, lora_request=adapter)
    differences = []
    for output in outputs:
        response = output.outputs[0]
        sequence = torch.tensor([[*output.prompt_token_ids, *response.token_ids]])
        log_probs = model(sequence).logits[0, :-1].float().log_softmax(-1)
        of_tokens = log_probs.gather(-1, sequence[0, 1:, None])[-TOKENS:, 0]
        engine_log_probs = [step[token].logprob for token, step in zip(response.token_ids, response.logprobs)]
        differences.append((of_tokens - torch.tensor(engine_log_probs)).abs())
    difference = torch.cat(differences)
    return f"{difference.mean():.1e} | {difference.max():.1e}"


def seconds_of(sync: Callable[[], int]) -> tuple[float, int]:
    started = time.perf_counter()
    sent = sync()
    return time.perf_counter() - started, sent


def syncs(engine: Any, model: Any, folder: Path) -> list[str]:
    """Rows of a full training's sync and of LoRA's, in turns so that the machine's other load meets all of them."""

    def of_full_training() -> int:
        return send(engine, dict(lora.base_parameters(model)), folder)

    def of_adapters() -> int:
        return send(engine, merged(model), folder)

    times: dict[str, list[tuple[float, int]]] = {"all weights": [], "LoRA": []}
    for _ in range(REPEATS):
        times["all weights"].append(seconds_of(of_full_training))
        times["LoRA"].append(seconds_of(of_adapters))
    rows = []
    for name, measured in times.items():
        seconds = median(duration for duration, _ in measured)
        rows.append(f"| {name} | {measured[0][1] / 1e6:.0f} MB | {seconds:.2f} s |")
    on_gpus = sum(weight.merged().nbytes for weight in lora.changed_weights(model))
    rows.append(f"| LoRA, between GPUs | {on_gpus / 1e6:.0f} MB | – |")
    return rows


def main(name: str) -> None:
    from transformers.utils import is_bitsandbytes_available
    from vllm.lora.request import LoRARequest

    folder = packaged.resolve(name)
    model = trainer(folder)
    print("| engine | trainer | mean | largest |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary)
        engine = engine_of(folder)
        with model.disable_adapter():
            print(f"| the checkpoint | without adapters | {mismatch(engine, model)} |", flush=True)
        send(engine, merged(model), path)
        print(f"| merged weights | LoRA | {mismatch(engine, model)} |", flush=True)
        rows = syncs(engine, model, path)
        if is_bitsandbytes_available():
            quantised = trainer(folder, in_four_bit=True)
            send(engine, merged(quantised), path)
            print(f"| merged weights, dequantised | QLoRA | {mismatch(engine, quantised)} |", flush=True)
            send(engine, on_whole_weights(folder, quantised), path)
            print(f"| adapters on the checkpoint | QLoRA | {mismatch(engine, quantised)} |", flush=True)
        del engine
        model.save_pretrained(path / "adapter")
        with_adapters = engine_of(folder, enable_lora=True, max_lora_rank=RANK)
        adapter = LoRARequest("adapter", 1, str(path / "adapter"))
        print(f"| adapter beside the weights | LoRA | {mismatch(with_adapters, model, adapter)} |", flush=True)
    print("\n| a weight sync by file | sent | median |\n| --- | --- | --- |")
    print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:] or ["smollm2-135m"])
