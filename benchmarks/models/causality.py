# SPDX-License-Identifier: Apache-2.0
"""Is stock vLLM's forward causal, and each text's its own? Asked without this project's plugin and any perturbation:

    python -m benchmarks.models.causality lfm2 [--dtype bfloat16] [--unpacked]

Log-probabilities of a text's tokens must not depend on the tokens behind them, nor on the other texts in the
batch, nor on whether the engine has answered before; and they should be those of transformers. Printed: |Δ log p| at
worst, of tiny models with random weights. `--unpacked` keeps vLLM from packing the weights of causal convolutions,
as it does on CPUs with AVX512-BF16.
"""

import argparse
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe

_LENGTH, _CHANGED = 20, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("type", help="transformers' model_type")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--unpacked", action="store_true")
    options = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": "none"}
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    warnings.simplefilter("ignore")
    import torch

    from benchmarks.models import tiny
    from ngrpo.machine.models.packaged import resolve

    print(f"{describe()}; {options.type}, {options.dtype}, stock vLLM{', unpacked' * options.unpacked}")
    with tempfile.TemporaryDirectory() as scratch:
        tiny.build(options.type, Path(scratch), Path(resolve("smollm2-135m")), getattr(torch, options.dtype))
        texts = _texts()
        theirs = _of_transformers(scratch, options.dtype, texts["text"])
        for what, apart in _apart(_engine(scratch, options), texts, theirs).items():
            print(f"{what:45s} {apart:.1e}", flush=True)


def _texts() -> dict[str, list[int]]:
    """A text, the same with another token in its midst, and another one."""
    tokens = np.random.default_rng(0).integers(1000, 40000, 2 * _LENGTH + 1).tolist()
    text, beside, other = tokens[:_LENGTH], tokens[_LENGTH:-1], tokens[-1]
    return {"text": text, "changed": [*text[:_CHANGED], other, *text[_CHANGED + 1 :]], "beside": beside}


def _engine(folder: str, options: argparse.Namespace) -> Any:
    from vllm import LLM, _custom_ops

    if options.unpacked:
        del _custom_ops.causal_conv1d_weight_pack  # vLLM packs where it has this
    one = {"distributed_executor_backend": "uni", "kv_cache_memory_bytes": 1 << 28, "max_model_len": 128}
    return LLM(folder, dtype=options.dtype, enforce_eager=True, max_num_seqs=8, **one)


def _apart(llm: Any, texts: dict[str, list[int]], theirs: np.ndarray) -> dict[str, float]:
    text, changed, beside = texts["text"], texts["changed"], texts["beside"]
    first = _of_vllm(llm, text)[0]

    def worst(ones: np.ndarray, others: np.ndarray) -> float:
        return float(np.abs(ones - others).max())

    return {
        "the text again": worst(first, _of_vllm(llm, text)[0]),
        "tokens before one that is changed": worst(first[: _CHANGED - 1], _of_vllm(llm, changed)[0][: _CHANGED - 1]),
        "tokens behind it, for comparison": worst(first[_CHANGED:], _of_vllm(llm, changed)[0][_CHANGED:]),
        "with a text behind it in the batch": worst(first, _of_vllm(llm, text, beside)[0]),
        "with a text in front of it in the batch": worst(first, _of_vllm(llm, beside, text)[1]),
        "transformers": worst(first, theirs),
    }


def _of_vllm(llm: Any, *texts: list[int]) -> list[np.ndarray]:
    """log π of each token but the first of texts that are asked at once."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    answers = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    return [
        np.array(
            [logprobs[token].logprob for token, logprobs in zip(text[1:], answer.prompt_logprobs[1:], strict=True)]
        )
        for text, answer in zip(texts, answers, strict=True)
    ]


def _of_transformers(folder: str, dtype: str, text: list[int]) -> np.ndarray:
    import torch
    from transformers import AutoConfig

    from benchmarks.models.tiny import model_class

    auto = model_class(AutoConfig.from_pretrained(folder))
    model = auto.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(text[1:])[:, None])[:, 0].numpy()


if __name__ == "__main__":
    main()
    # vLLM's engines do not end well together with the interpreter of Python.
    sys.stdout.flush()
    os._exit(0)
