# SPDX-License-Identifier: Apache-2.0
"""The models of the stages: the packaged one, and random weights of a shape, made once."""

import contextlib
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.stages import SMOLLM2
from ngrpo.machine.models.packaged import cache_dir, resolve
from perturbations.errors import UsageError

SHAPES: dict[str, dict[str, Any]] = {
    # The sizes of Qwen2.5-1.5B; as a Llama, which differs by a bias, because a Qwen2 brings its own tokenizer's tokens.
    "1.5b": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    # Of Qwen2.5-0.5B, with the entropy of a trained model's draws rather than that of its vocabulary.
    "0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    },
    # SmolLM2-135M, for a machine without the package of its weights. Larger random weights amplify rounding, to more
    # than an exact replay may differ by: the worst log-probability in float32 against float64 is off by 8e-6 at 0.04
    # and by 2e-4 at 0.1. A row that is not replayed still changes it by 0.2 to 0.4 nats.
    SMOLLM2: {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "initializer_range": 0.04,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    },
}
LONGEST = 4096


def folder_of(shape: str) -> tuple[str, str]:
    """A model's folder and its name: the packaged model where its package is installed, or random weights."""
    if shape == SMOLLM2:
        with contextlib.suppress(UsageError):
            return resolve(SMOLLM2), SMOLLM2
    return made(shape), f"random weights, {shape}"


def made(shape: str, *, weights: bool = True) -> str:
    """A folder in the cache with a configuration, a tokenizer of numbered words, and random weights from one seed."""
    content = "random" if weights else "shape"
    folder = cache_dir() / f"benchmark-{content}-{shape}-r2"
    if folder.is_dir():
        return str(folder)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    config = AutoConfig.for_model(
        "llama",
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        max_position_embeddings=LONGEST,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        **SHAPES[shape],
    )
    try:
        torch.manual_seed(0)
        if weights:
            AutoModelForCausalLM.from_config(config).save_pretrained(draft)
        else:
            config.save_pretrained(draft)
        _tokenizer(SHAPES[shape]["vocab_size"]).save_pretrained(draft)
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster, with the same result
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return str(folder)


def _tokenizer(size: int) -> Any:
    """A tokenizer of the words w0, w1, … as many as there are tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(size)}, unk_token="w2"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", pad_token="w1")


def prompts(llm: Any, count: int, tokens: int = 40) -> list[list[int]]:
    """Prompts of one length, random and all different, as token ids that no tokenizer keeps for itself."""
    import numpy as np

    tokenizer = llm.get_tokenizer()
    draws = np.random.default_rng(0)
    ordinary = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
    return draws.choice(ordinary, (count, tokens)).tolist()


class Engines(NamedTuple):
    """Two engines in this process.

    Attributes:
        stock: vLLM without a perturbation.
        perturbed: with one, which is set for each measurement.
        columns: what rows say of both: model and runner.
    """

    stock: Any
    perturbed: Any
    columns: dict[str, str]


def both_engines(shape: str, sequences: int, rehearse: bool) -> Engines:
    """A stock engine and a perturbed one of a model, for as many sequences at once."""
    from benchmarks import rollout
    from ngrpo.rollout import model_runner

    warnings.simplefilter("ignore")
    options: dict[str, Any] = {"max_num_seqs": sequences, "disable_log_stats": True}
    if rehearse:
        options["kv_cache_memory_bytes"] = 1 << 26
    if shape == SMOLLM2:
        folder, name = folder_of(shape)
    else:
        folder = made(shape, weights=False)
        name = f"random weights, {shape}"
        options["load_format"] = "dummy"
    compiled = not rehearse
    stock = rollout.engine(folder, None, compiled, **options)
    perturbed = rollout.engine(folder, {"name": "gumbel"}, compiled, **options)
    runner = model_runner(perturbed)
    stock_runner = "V2" if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" else "V1"
    if not rehearse and runner != stock_runner:
        raise RuntimeError(f"the perturbed engine has the {runner} model runner, and stock {stock_runner}")
    return Engines(stock, perturbed, {"model": name, "runner": runner})
