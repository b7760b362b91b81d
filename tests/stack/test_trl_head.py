# SPDX-License-Identifier: Apache-2.0
"""TRL's fused output layer with sampling masks, without an engine: values and gradients against a dense formula."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="needs TRL: pip install --no-deps trl==1.16.0")
from trl.trainer import utils

from ngrpo.trainers.trl_head import corrected_head
from perturbations import FinishedTrajectory
from perturbations.replay.sampling_mask import SamplingMask
from tests.support.replay_examples import small

VOCABULARY = 97
TEMPERATURE = 1.3
# Two samples of a batch of 9 columns, padded on both sides: (first column, prompt's tokens, completion's tokens).
SAMPLES = ((2, 2, 3), (0, 4, 5))
COLUMNS = 9
KEPT = 5  # columns of completions


@pytest.fixture
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.5, tie_word_embeddings=False, **sizes)
    made = LlamaForCausalLM(config)
    utils.add_fused_lm_head(made, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    return made


def batch() -> tuple[Tensor, Tensor, list[dict[int, np.ndarray]]]:
    """Tokens and attention mask, (B, T), and by sample and position in its trajectory the tokens that were left."""
    random = np.random.default_rng(4)
    tokens = torch.from_numpy(random.integers(0, VOCABULARY, (2, COLUMNS)))
    attention_mask = torch.zeros(2, COLUMNS, dtype=torch.int64)
    sets: list[dict[int, np.ndarray]] = []
    for row, (first, prompt, completion) in enumerate(SAMPLES):
        attention_mask[row, first : first + prompt + completion] = 1
        of_sample = {}
        for position in range(prompt, prompt + completion, 2):
            drawn = int(tokens[row, first + position])
            of_sample[position] = np.unique([drawn, *random.integers(0, VOCABULARY, 7)])
        sets.append(of_sample)
    # The engine wrote one token more than was trained.
    sets[1][9] = np.array([3])
    return tokens, attention_mask, sets


def trajectories(sets: list[dict[int, np.ndarray]]) -> list[FinishedTrajectory]:
    made = []
    for of_sample in sets:
        mask = SamplingMask.of(VOCABULARY, {position: (False, ids) for position, ids in of_sample.items()})
        made.append(FinishedTrajectory(small([]), np.zeros(3, np.float32), sampling_mask=mask))
    return made


def scored(model: Any, tokens: Tensor, attention_mask: Tensor) -> Tensor:
    """As TRL's trainer scores completions, (B, KEPT)."""
    labels = tokens.masked_fill(attention_mask == 0, -100)
    labels[:, :-KEPT] = -100
    outputs = model(input_ids=tokens, attention_mask=attention_mask, labels=labels, fused_lm_head=True)
    return outputs.log_probs[:, -KEPT:]


def dense(model: Any, tokens: Tensor, attention_mask: Tensor, sets: list[dict[int, np.ndarray]]) -> Tensor:
    """The same from all logits, 0 where no token is scored."""
    logits = model(input_ids=tokens, attention_mask=attention_mask).logits / TEMPERATURE
    log_probs = torch.zeros(2, KEPT)
    for row, (first, prompt, completion) in enumerate(SAMPLES):
        for position in range(prompt, prompt + completion):
            column = first + position
            if column < COLUMNS - KEPT:
                continue
            scores = logits[row, column - 1]
            among = torch.from_numpy(sets[row].get(position, np.arange(VOCABULARY)))
            log_probs[row, column - (COLUMNS - KEPT)] = scores[tokens[row, column]] - scores[among].logsumexp(0)
    return log_probs


@pytest.mark.parametrize("compact", [False, True], ids=["all rows", "scored rows, as on a GPU"])
def test_values_and_gradients_are_those_of_the_renormalised_policy(
    compact: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utils, "_use_triton", lambda device: compact)
    tokens, attention_mask, sets = batch()
    wanted = dense(model, tokens, attention_mask, sets)
    weights = torch.randn(2, KEPT, generator=torch.Generator().manual_seed(5))
    (wanted * weights).sum().backward()
    gradient = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    with corrected_head(trajectories(sets), attention_mask, KEPT):
        log_probs = scored(model, tokens, attention_mask)
    torch.testing.assert_close(log_probs, wanted, rtol=0.0, atol=1e-5)
    (log_probs * weights).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradient[name], rtol=1e-4, atol=1e-5)
    # Afterwards, and without it, TRL's own are of the whole distribution.
    whole = scored(model, tokens, attention_mask)
    torch.testing.assert_close(whole, dense(model, tokens, attention_mask, [{}, {}]), rtol=0.0, atol=1e-5)
    assert float((whole - wanted).detach().abs().max()) > 0.1


def test_the_model_s_scale_and_soft_cap_of_logits_are_kept(model: Any) -> None:
    """30 tanh(0.25 z / 30) / 1.3, over three tokens of which the second was drawn."""
    _, attention_mask, _ = batch()
    with corrected_head(trajectories([{2: np.array([5, 7, 11])}, {}]), attention_mask, KEPT):
        hidden = torch.randn(2 * (COLUMNS - 1), 16)
        weight = torch.randn(VOCABULARY, 16)
        targets = torch.full((2 * (COLUMNS - 1),), 7)
        log_probs, *_ = utils._ChunkedLogProbFunction.apply(
            hidden, weight, None, targets, TEMPERATURE, 32, 30.0, 0.25, ("entropy",)
        )
    # The token at position 2 of the first sample is in column 4, and column 3 chose it.
    logits = 30.0 * torch.tanh(0.25 * (weight[[5, 7, 11]] @ hidden[3]) / 30.0) / TEMPERATURE
    assert float(log_probs[3]) == pytest.approx(float(logits.log_softmax(0)[1]), abs=1e-5)


def test_a_token_that_was_cut_and_a_head_that_is_not_called_are_errors(model: Any) -> None:
    tokens, attention_mask, sets = batch()
    drawn = int(tokens[0, 4])
    wrong = [{2: np.array([(drawn + 1) % VOCABULARY])}, {}]
    in_head = corrected_head(trajectories(wrong), attention_mask, KEPT)
    with pytest.raises(RuntimeError, match="1 of 1 tokens"), in_head:
        scored(model, tokens, attention_mask)
    around_another = corrected_head(trajectories(sets), attention_mask, KEPT)
    with pytest.raises(RuntimeError, match="did not come into effect"), around_another:
        model(input_ids=tokens, attention_mask=attention_mask)
    without_mask = FinishedTrajectory(small([]), np.zeros(3, np.float32))
    with pytest.raises(RuntimeError, match="came without their sampling mask"):
        corrected_head([without_mask, None], attention_mask, KEPT).__enter__()
