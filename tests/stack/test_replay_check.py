# SPDX-License-Identifier: Apache-2.0
"""The trainer's start-up check on Transformers' classes: each way of embedding passes, wrong replays are named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngrpo.rollout.check_texts import CheckFailure
from ngrpo.trainers.common.replay_check import check_replay
from perturbations.replay import scope
from tests.stack.tiny_models import FORMS, tiny_model

_FORMS = [form for form, (_, _, engine_options) in FORMS.items() if "model_impl" not in engine_options]


def loaded(form: str, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import AutoModelForCausalLM

    path = tiny_model(form, folder)
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def forward_of(model: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A forward with the arguments and the result of OpenRLHF's actor."""

    @torch.no_grad()
    def action_log_probs(sequences: Tensor, action_mask: Tensor, attention_mask: Tensor) -> Tensor:
        logits = model(sequences, attention_mask=attention_mask).logits.float()
        log_softmax = logits[:, :-1].log_softmax(-1)
        log_probs = log_softmax.gather(-1, sequences[:, 1:, None]).squeeze(-1)
        return log_probs[:, -action_mask.shape[1] :]

    return action_log_probs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", _FORMS)
def test_every_way_of_embedding_is_replayed(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = loaded(form, tmp_path, dtype)
    check_replay(model, forward_of(model))


# What takes the place of `flat_rows`' result: the row of each edit in the batch, and whether it lies in the batch.
WRONG: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "one row off": lambda rows, inside: (rows + 1, inside),
    "first row": lambda rows, inside: (torch.zeros_like(rows), inside),
    "nowhere": lambda rows, inside: (rows, torch.zeros_like(inside)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["plain", "scaled", "per_layer"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_replay_that_misses_its_row_is_named(
    form: str, dtype: torch.dtype, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(form, tmp_path, dtype)
    right_rows = scope.flat_rows

    def wrong_rows(*args: Any) -> tuple[Tensor, Tensor]:
        rows, inside = right_rows(*args)
        return WRONG[wrong](rows, inside)

    monkeypatch.setattr(scope, "flat_rows", wrong_rows)
    with pytest.raises(CheckFailure, match=r"the trainer does not feed .*\n  [^:]+: off by"):
        check_replay(model, forward_of(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_factor_once_too_often_is_named(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("scaled", tmp_path, dtype)
    factor = model.get_input_embeddings().scalar_embed_scale
    right_mix = scope.mix
    monkeypatch.setattr(scope, "mix", lambda *args: factor * right_mix(*args))
    with pytest.raises(CheckFailure, match="its own token's embedding: off by"):
        check_replay(model, forward_of(model))


def test_a_model_that_ignores_its_inputs_cannot_be_proven(tmp_path: Path) -> None:
    model = loaded("plain", tmp_path)
    nn.init.zeros_(model.lm_head.weight)
    with pytest.raises(CheckFailure, match="cannot be checked for LlamaForCausalLM"):
        check_replay(model, forward_of(model))


class Normed(nn.Embedding):
    """An input embedding that normalises its rows, as that of some models does."""

    def forward(self, ids: Tensor) -> Tensor:
        rows = super().forward(ids)
        return rows / rows.norm(dim=-1, keepdim=True)


def test_an_embedding_that_is_no_multiple_of_its_matrix_is_refused(tmp_path: Path) -> None:
    model = loaded("plain", tmp_path)
    model.get_input_embeddings().__class__ = Normed
    with pytest.raises(ValueError, match="replay cannot mix embeddings of Normed"):
        check_replay(model, forward_of(model))
