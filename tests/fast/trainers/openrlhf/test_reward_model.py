# SPDX-License-Identifier: Apache-2.0
"""What OpenRLHF's own loader makes of reward models and critics, with our patch."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ngrpo import patches
from ngrpo.config import reward_and_critic
from ngrpo.config.reward_and_critic import CRITIC, REWARD
from ngrpo.config.run import begin
from ngrpo.machine.models import packaged
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.trainers.openrlhf import reward_model
from perturbations.errors import UsageError
from tests.support.own_process import RESULT, result_of
from tests.support.run import run_of, run_with


def test_a_head_that_was_made_at_random_ends_the_run(tmp_path: Path) -> None:
    pytest.importorskip("openrlhf")
    result = result_of("tests.fast.trainers.openrlhf.test_reward_model", str(tmp_path))
    assert result["saved"]["value_head_prefix"] == "v_head"
    assert result["judge"] == "loaded as RewardModel" and result["critic"] == "loaded as CriticModel"
    assert result["same head"]
    for name in ("plain", "plain .bin"):
        assert f"{name}: its files have no tensor score.weight (--ds.value_head_prefix score)" in result[name]
    assert "It has v_head.weight" in result["other name"]
    assert "its files lack 1 of its weights, such as model.norm.weight" in result["part"]


@pytest.mark.parametrize("flag", [REWARD, CRITIC])
def test_a_model_of_the_hub_is_compared_once_it_is_here(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The start could not; a model in a folder it has compared. Its tokenizer is loaded, which OpenRLHF leaves out."""
    done: list[str] = []
    local = reward_and_critic.Local(flag, "owner/judge", Path())

    def check_tokens(local: reward_and_critic.Local, flags: Flags, run: object) -> str | None:
        done.append(f"compared {local}")
        return "not checked: why" if len(done) > 2 else None

    monkeypatch.setattr(packaged, "load_tokenizer", lambda name: done.append(f"tokenizer of {name}"))
    monkeypatch.setattr(reward_and_critic, "find_local", lambda flag, name: local)
    monkeypatch.setattr(reward_and_critic, "check_tokens", check_tokens)
    run_with(monkeypatch)
    load = reward_model.with_compared_tokens(lambda name, model_type, **kwargs: name)
    kind = "reward" if flag == REWARD else "critic"
    assert load("owner/judge", kind, param_dtype="bf16") == "owner/judge" and load(".", kind) == "."
    assert done == ["tokenizer of owner/judge", f"compared {flag} owner/judge"] and capsys.readouterr().err == ""
    load("owner/judge", kind)
    assert capsys.readouterr().err == "ngrpo: warning: not checked: why\n"


def test_a_model_of_the_hub_that_cannot_be_compared_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_tokenizer(name: str) -> None:
        raise UsageError("no tokenizer")

    monkeypatch.setattr(packaged, "load_tokenizer", no_tokenizer)
    monkeypatch.setattr(reward_and_critic, "find_local", lambda flag, name: None)
    reward_model.check_tokens_of_hub(CRITIC, "owner/critic")
    assert "warning: not checked: whether --critic.model_name_or_path owner/critic" in capsys.readouterr().err


def main(folder: Path) -> None:
    """Prints how each of these models was loaded."""
    patches.install((patches.TRAINING, "without_flash_attn"))
    begin(run_of())
    from openrlhf.models import get_llm_for_sequence_regression
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
    plain = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes))
    plain.save_pretrained(folder / "plain")
    plain.config.save_pretrained(folder / "plain .bin")
    torch.save(plain.state_dict(), folder / "plain .bin" / "pytorch_model.bin")
    result: dict[str, Any] = {}

    def load(name: str, kind: str = "reward", **options: Any) -> str:
        try:
            model = get_llm_for_sequence_regression(
                str(folder / name), kind, attn_implementation="eager", param_dtype="bf16", **options
            )
        except UsageError as error:
            return str(error)
        return f"loaded as {type(model).__name__}"

    # As openrlhf.cli.train_rm makes a reward model from a language model, trains and saves it.
    trained = get_llm_for_sequence_regression(
        str(folder / "plain"), "critic", attn_implementation="eager", init_value_head=True, value_head_prefix="v_head"
    )
    trained.config.value_head_prefix = "v_head"
    trained.save_pretrained(folder / "judge")
    result["saved"] = json.loads((folder / "judge" / "config.json").read_text())
    reward_and_critic.check_head(folder / "judge", Flags(), subject="judge")
    result["judge"] = load("judge")
    loaded = get_llm_for_sequence_regression(str(folder / "judge"), "reward", attn_implementation="eager")
    result["same head"] = torch.equal(loaded.v_head.weight, trained.v_head.weight)
    for name in ("plain", "plain .bin"):
        result[name] = load(name)
    result["critic"] = load("plain", "critic")

    for name in ("other name", "part"):
        LlamaConfig.from_pretrained(folder / "plain").save_pretrained(folder / name)
    tensors = load_file(folder / "judge" / "model.safetensors")
    save_file(tensors, folder / "other name" / "model.safetensors", metadata={"format": "pt"})
    result["other name"] = load("other name")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "part" / "model.safetensors", metadata={"format": "pt"})
    result["part"] = load("part", value_head_prefix="v_head")
    print(RESULT + json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
