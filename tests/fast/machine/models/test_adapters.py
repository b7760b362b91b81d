# SPDX-License-Identifier: Apache-2.0
"""Folders with an adapter: taken as models, merged once, or by name onto another base; and what is no such folder."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("vllm")

from ngrpo import cli
from ngrpo.machine.models import adapters, packaged
from perturbations import UsageError
from tests.stack.tiny_models import tiny_model
from tests.support.lora_models import adapted

TOKENS = torch.arange(3, 27).view(2, 12)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """A base model's folder, an adapter's folder as a training leaves it, and the logits of the adapted model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = tiny_model("plain", tmp_path_factory.mktemp("base"))
    adapter = tmp_path_factory.mktemp("adapter")
    model = adapted(AutoModelForCausalLM.from_pretrained(base))
    model.save_pretrained(adapter)
    AutoTokenizer.from_pretrained(base).save_pretrained(adapter)
    (adapter / "perturbation").mkdir()
    (adapter / "perturbation" / "module.safetensors").write_bytes(b"own parameters")
    with torch.no_grad():
        return base, adapter, model(TOKENS).logits


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NGRPO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def assert_whole(folder: str | Path, logits: torch.Tensor) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, logits, rtol=1e-4, atol=1e-4)
    assert len(AutoTokenizer.from_pretrained(folder)) == 512
    assert Path(folder, "perturbation", "module.safetensors").read_bytes() == b"own parameters"


def test_a_folder_that_names_its_base_is_a_model(saved: tuple[str, Path, Any], cache: Path) -> None:
    base, adapter, logits = saved
    assert adapters.base_of(adapter) == base
    said: list[str] = []
    folder = packaged.resolve(str(adapter), report=said.append)
    assert_whole(folder, logits)
    assert len(said) == 1 and said[0].startswith(f"merging {adapter} into {base}, once: ")
    assert packaged.resolve(str(adapter), report=said.append) == folder and len(said) == 1
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == [Path(folder)]


def test_a_retrained_adapter_is_merged_again(saved: tuple[str, Path, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    adapter = tmp_path / "adapter"
    shutil.copytree(saved[1], adapter)
    first = packaged.resolve(str(adapter))
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, adapter / "adapter_model.safetensors")
    assert packaged.resolve(str(adapter)) != first


def test_the_command_writes_a_whole_model(
    saved: tuple[str, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter, logits = saved
    moved = tmp_path / "moved"
    shutil.copytree(base, moved)
    target = tmp_path / "whole"

    def full(source: Path, draft: Path, **options: Any) -> None:
        (draft / "config.json").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", full)
        assert cli.main(["model", "merge", str(adapter), str(target), str(moved)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert not target.exists(), "the same command then writes it"

    assert cli.main(["model", "merge", str(adapter), str(target), str(moved)]) == 0
    assert capsys.readouterr().out.strip() == str(target)
    assert_whole(target, logits)
    assert cli.main(["model", "merge", str(adapter), str(target)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_what_is_no_adapter_or_does_not_fit(saved: tuple[str, Path, Any], tmp_path: Path) -> None:
    _, adapter, _ = saved
    with pytest.raises(UsageError, match=r"must be a folder with adapter_config\.json"):
        packaged.merged_adapter(str(tmp_path))
    other = tiny_model("mixture", tmp_path)
    with pytest.raises(UsageError, match="does not fit the model"):
        packaged.merged_adapter(str(adapter), other)
    nameless = tmp_path / "nameless"
    shutil.copytree(adapter, nameless)
    config = json.loads((nameless / "adapter_config.json").read_text())
    (nameless / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(UsageError, match="names no base_model_name_or_path"):
        packaged.resolve(str(nameless))
