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
from typing import Any, NamedTuple

import numpy as np

from benchmarks.command_line import parser_of
from benchmarks.machine import describe

_LENGTH = 20  # of a text
_CHANGED = 10  # the position of the changed token


class Texts(NamedTuple):
    """The texts of the comparison.

    Attributes:
        text: is measured.
        changed: the same with another token in its midst.
        beside: another one, for the batch.
    """

    text: list[int]
    changed: list[int]
    beside: list[int]


def main() -> None:
    parser = parser_of(__doc__)
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

    packing = ", unpacked" if options.unpacked else ""
    print(f"{describe()}; {options.type}, {options.dtype}, stock vLLM{packing}")
    with tempfile.TemporaryDirectory() as folder:
        tiny.build(options.type, Path(folder), Path(resolve("smollm2-135m")), getattr(torch, options.dtype))
        texts = _texts()
        transformers_log_probs = _log_probs_of_transformers(folder, options.dtype, texts.text)
        for comparison, gap in _largest_gaps(_engine(folder, options), texts, transformers_log_probs).items():
            print(f"{comparison:45s} {gap:.1e}", flush=True)


def _texts() -> Texts:
    tokens = np.random.default_rng(0).integers(1000, 40000, 2 * _LENGTH + 1).tolist()
    text = tokens[:_LENGTH]
    changed = list(text)
    changed[_CHANGED] = tokens[-1]
    return Texts(text=text, changed=changed, beside=tokens[_LENGTH:-1])


def _engine(folder: str, options: argparse.Namespace) -> Any:
    from vllm import LLM, _custom_ops

    if options.unpacked:
        del _custom_ops.causal_conv1d_weight_pack  # vLLM packs where it has this
    return LLM(
        folder,
        dtype=options.dtype,
        enforce_eager=True,
        max_num_seqs=8,
        max_model_len=128,
        kv_cache_memory_bytes=1 << 28,
        distributed_executor_backend="uni",
    )


def _largest_gaps(llm: Any, texts: Texts, transformers_log_probs: np.ndarray) -> dict[str, float]:
    """|Δ log p| at worst between the first forward of the text and others, by what is different."""
    text, changed, beside = texts
    first = _log_probs_of_vllm(llm, text)[0]

    def largest(log_probs: np.ndarray, expected: np.ndarray) -> float:
        return float(np.abs(log_probs - expected).max())

    again = _log_probs_of_vllm(llm, text)[0]
    of_changed = _log_probs_of_vllm(llm, changed)[0]
    of_changed_again = _log_probs_of_vllm(llm, changed)[0]
    before_another = _log_probs_of_vllm(llm, text, beside)[0]
    after_another = _log_probs_of_vllm(llm, beside, text)[1]
    return {
        "the text again": largest(again, first),
        "tokens before one that is changed": largest(of_changed[: _CHANGED - 1], first[: _CHANGED - 1]),
        "tokens behind it, for comparison": largest(of_changed_again[_CHANGED:], first[_CHANGED:]),
        "with a text behind it in the batch": largest(before_another, first),
        "with a text in front of it in the batch": largest(after_another, first),
        "transformers": largest(transformers_log_probs, first),
    }


def _log_probs_of_vllm(llm: Any, *texts: list[int]) -> list[np.ndarray]:
    """log π of each token but the first of texts that are asked at once."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    log_probs = []
    for text, output in zip(texts, outputs, strict=True):
        of_tokens = zip(text[1:], output.prompt_logprobs[1:], strict=True)
        log_probs.append(np.array([by_token[token].logprob for token, by_token in of_tokens]))
    return log_probs


def _log_probs_of_transformers(folder: str, dtype: str, text: list[int]) -> np.ndarray:
    import torch
    from transformers import AutoConfig

    from benchmarks.models.tiny import model_class

    auto = model_class(AutoConfig.from_pretrained(folder))
    model = auto.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0, :-1].float()
    next_tokens = torch.tensor(text[1:]).unsqueeze(-1)
    return logits.log_softmax(-1).gather(-1, next_tokens).squeeze(-1).numpy()


if __name__ == "__main__":
    main()
    # vLLM's engines do not end well together with the interpreter of Python.
    sys.stdout.flush()
    os._exit(0)
