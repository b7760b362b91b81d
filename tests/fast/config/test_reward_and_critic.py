# SPDX-License-Identifier: Apache-2.0
"""A reward model without its head, and one or a critic of another tokenizer, are refused; OpenRLHF trains on them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from ngrpo.config import input_checks, reward_and_critic
from ngrpo.config.complete_run import CompleteRun
from ngrpo.machine.models.weight_files import tensor_shapes
from ngrpo.machine.upstream import placement
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError
from tests.support.run import run_of

WORDS = ("<end>", "a", "b", "c", "d", "e", "f", "g")
SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
Change = Callable[[Path], object]


def save_tokenizer(folder: Path, words: tuple[str, ...] = WORDS, special: tuple[str, ...] = ()) -> None:
    """Words of the texts, the first of them the end token, then special tokens that no prompt has."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[0])
    fast.add_tokens([AddedToken(token, special=True) for token in special])
    fast.save_pretrained(folder)


def save_model(folder: Path, kind: type = LlamaForSequenceClassification, rows: int = 16, heads: int = 1) -> None:
    torch.manual_seed(0)
    kind(LlamaConfig(vocab_size=rows, num_labels=heads, pad_token_id=0, **SIZES)).save_pretrained(folder)


def renamed(folder: Path, head: str) -> None:
    """Gives the head another name in the model's file."""
    tensors = load_file(folder / "model.safetensors")
    tensors[head] = tensors.pop("score.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configured(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A policy `policy`, and a reward model `judge` that goes with it."""
    monkeypatch.chdir(tmp_path)
    save_model(Path("policy"), LlamaForCausalLM)
    save_model(Path("judge"))
    for name in ("policy", "judge"):
        save_tokenizer(Path(name))
    return tmp_path


def checked(words: str = "--reward.model_name_or_path judge", **run: object) -> str | None:
    input_checks.tokenizer_in.cache_clear()
    flags = Flags(["--actor.model_name_or_path", "policy", *words.split()])
    return reward_and_critic.check(CompleteRun(run=run_of(**run), flags=flags))


def test_a_reward_model_with_its_head_passes(folders: Path) -> None:
    assert checked() is None
    assert checked("--reward.remote_url http://localhost:5000 --reward.model_name_or_path nowhere") is None
    renamed(Path("judge"), "v_head.weight")
    assert checked("--reward.model_name_or_path judge --ds.value_head_prefix v_head") is None
    configured(Path("judge"), value_head_prefix="v_head")  # as openrlhf.cli.train_rm writes it
    assert checked() is None
    assert checked("--reward.model_name_or_path judge --ds.value_head_prefix other") is None


def test_a_base_model_s_prefix_before_the_head_passes(folders: Path) -> None:
    """transformers loads it."""
    renamed(Path("judge"), "model.score.weight")
    assert checked() is None


@pytest.mark.parametrize(
    ("change", "words", "said"),
    [
        (lambda judge: save_model(judge, LlamaForCausalLM), "", "no head of another name either. Give a reward model"),
        (
            lambda judge: None,
            "--ds.value_head_prefix scroe",
            "no tensor scroe.weight (--ds.value_head_prefix scroe), so its rewards would be those of a random head. It"
            " has score.weight. Did you mean 'score'? Give --ds.value_head_prefix with the name of its head: score.",
        ),
        (lambda judge: renamed(judge, "v_head.weight"), "", "It has v_head.weight"),
        (lambda judge: renamed(judge, "v_head.summary.weight"), "", "is like one: v_head.summary.weight"),
        (
            lambda judge: configured(judge, value_head_prefix="reward"),
            "--ds.value_head_prefix score",
            "no tensor reward.weight (value_head_prefix of its config.json)",
        ),
        (lambda judge: save_model(judge, heads=2), "", "score.weight has 2 outputs"),
        (lambda judge: (judge / "model.safetensors").unlink(), "", "has no weights (*.safetensors). Download"),
        (lambda judge: (judge / "model.safetensors").write_bytes(b""), "", "holds no weights"),
        (
            lambda judge: save_tokenizer(judge, ("<end>", *reversed(WORDS[1:]))),
            "",
            "has 6 of these 8 tokens otherwise: 1 is 'a' and there 'g'. Give one with this tokenizer, or serve it",
        ),
        (lambda judge: save_tokenizer(judge, WORDS[:-1]), "", "has 1 of these 8 tokens otherwise: 7 is 'g' and there"),
        (lambda judge: save_model(judge, rows=7), "", "up to 7, and it has embeddings of 7 tokens"),
    ],
)
def test_a_reward_model_that_cannot_judge(folders: Path, change: Change, words: str, said: str) -> None:
    change(Path("judge"))
    with pytest.raises(UsageError) as error:
        checked(f"--reward.model_name_or_path judge {words}")
    assert str(error.value).startswith("--reward.model_name_or_path judge: ")
    assert said in str(error.value), error.value


def test_special_tokens_that_no_text_has_are_a_warning(folders: Path) -> None:
    """As <think> of Qwen3, which a reward model made from Qwen2.5 lacks; the end token is in every response."""
    save_tokenizer(Path("policy"), special=("<think>",))
    assert checked() is None
    flags = Flags(["--actor.model_name_or_path", "policy", "--reward.model_name_or_path", "judge"])
    (note,) = reward_and_critic.notes(CompleteRun(run=run_of(), flags=flags))
    assert "has 1 of the model's special tokens otherwise: 8 is '<think>' and there no token." in note
    save_tokenizer(Path("judge"), ("</s>", *WORDS[1:]), special=("<think>",))
    with pytest.raises(UsageError, match="1 of these 9 tokens otherwise: 0 is '<end>' and there '</s>'"):
        checked()


def test_a_critic_needs_no_head_and_the_same_tokens(folders: Path) -> None:
    words = "--algo.advantage.estimator gae --reward.remote_url r.py --critic.model_name_or_path"
    save_model(Path("critic"), LlamaForCausalLM)
    save_tokenizer(Path("critic"))
    assert checked(f"{words} critic") is None
    assert checked(f"{words} policy") is None
    save_tokenizer(Path("critic"), ("<end>", *reversed(WORDS[1:])))
    with pytest.raises(UsageError, match=r"--critic.*or leave the flag out"):
        checked(f"{words} critic")
    assert checked(f"{words} critic".replace("gae", "group_norm")) is None  # which has no critic


def test_adapters_are_refused_with_the_way_to_merge_them(folders: Path) -> None:
    """PEFT writes no config.json, of which OpenRLHF's loader reads the type, and OpenRLHF's train_rm does."""
    Path("adapter").mkdir()
    Path("judge/adapter_config.json").write_text("{}")
    Path("adapter/adapter_config.json").write_text("{}")
    for name in ("judge", "adapter"):
        with pytest.raises(UsageError, match=rf"{name}: has a LoRA adapter .*AutoPeftModelForSequenceClassification"):
            checked(f"--reward.model_name_or_path {name}")
    words = "--algo.advantage.estimator gae --reward.remote_url r.py --critic.model_name_or_path adapter"
    with pytest.raises(UsageError, match=r"ngrpo model merge adapter FOLDER"):
        checked(words)


def test_what_a_start_cannot_see_is_said(folders: Path) -> None:
    """A planned run needs no weights, and a reward model no tokenizer; the head of a .bin is checked in the worker."""
    critic = "--algo.advantage.estimator gae --reward.remote_url r.py --critic.model_name_or_path owner/critic"
    for words in ("--reward.model_name_or_path owner/judge", critic):
        assert "which is not here. One that does not fit ends the run" in (checked(words) or "")
    shutil.copytree("judge", "binary")
    torch.save({"model.norm.weight": torch.ones(8)}, "binary/pytorch_model.bin")
    Path("binary/model.safetensors").unlink()
    assert checked("--reward.model_name_or_path binary") is None
    Path("judge/model.safetensors").unlink()
    planned = placement.planned("8x80", "-")
    assert "has no weights here" in (checked(machine=planned) or "")
    for file in Path("binary").glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer that can be used" in (checked("--reward.model_name_or_path binary") or "")


def test_the_tensors_of_files_in_parts(tmp_path: Path) -> None:
    save_file({"score.weight": torch.ones(1, 8)}, tmp_path / "part-1.safetensors")
    index = {"weight_map": {"score.weight": "part-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert tensor_shapes(tmp_path) == {"score.weight": (1, 8)}
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "pytorch_model.bin.index.json")
    assert tensor_shapes(tmp_path) == {"score.weight": None}
    (tmp_path / "pytorch_model.bin").touch()
    assert tensor_shapes(tmp_path) is None
