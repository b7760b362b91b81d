# SPDX-License-Identifier: Apache-2.0
"""The models of the stages: the packaged one, and random weights of a shape, made once."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from ngrpo.models.packaged import cache_dir, resolve
from perturbations.errors import UsageError

SMOLLM2 = "smollm2-135m"
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
    # SmolLM2-135M, for a machine without the package of its weights.
    SMOLLM2: {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
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


def smollm2() -> tuple[str, str]:
    """The packaged model, or random weights of its shape where its package is not installed: folder, and its name."""
    try:
        return resolve(SMOLLM2), SMOLLM2
    except UsageError:
        return random_weights(SMOLLM2), f"random weights of the shape of {SMOLLM2}"


def random_weights(shape: str) -> str:
    """A folder with a configuration, random float32 weights from one seed, and a tokenizer of numbered words."""

    def fill(folder: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(_config(AutoConfig, shape)).save_pretrained(folder)

    return _made(f"random-{shape}", shape, fill)


def without_weights(shape: str) -> str:
    """A folder with a configuration and a tokenizer, for vLLM's ``load_format="dummy"``."""

    def fill(folder: Path) -> None:
        from transformers import AutoConfig

        _config(AutoConfig, shape).save_pretrained(folder)

    return _made(f"shape-{shape}", shape, fill)


def _config(factory: Any, shape: str) -> Any:
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    kind = {"architectures": ["LlamaForCausalLM"], "dtype": "float32", "max_position_embeddings": LONGEST}
    return factory.for_model("llama", **kind, **tokens, **SHAPES[shape])


def _made(name: str, shape: str, fill: Any) -> str:
    """A folder in the cache, written beside its place and renamed."""
    folder = cache_dir() / f"benchmark-{name}-r1"
    if folder.is_dir():
        return str(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fill(draft)
        _tokenizer(SHAPES[shape]["vocab_size"]).save_pretrained(draft)
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster, with the same result
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return str(folder)


def _tokenizer(size: int) -> Any:
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
