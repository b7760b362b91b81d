# SPDX-License-Identifier: Apache-2.0
"""TRL's fused output layer with sampling masks, without an engine: values and gradients against a dense formula."""

from typing import Any, NamedTuple

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


class Sample(NamedTuple):
    """Where a sample lies in its row of the batch, which is padded on both sides."""

    start: int
    prompt: int
    completion: int

    @property
    def end(self) -> int:
        return self.start + self.prompt + self.completion

    @property
    def completion_positions(self) -> range:
        """The positions of the completion's tokens in the trajectory."""
        return range(self.prompt, self.prompt + self.completion)


SAMPLES = (Sample(start=2, prompt=2, completion=3), Sample(start=0, prompt=4, completion=5))
COLUMNS = 9
# TRL scores the last columns, those of the longest completion.
SCORED = 5
FIRST_SCORED = COLUMNS - SCORED

LeftTokens = dict[int, np.ndarray]
"""The tokens that sampling left, by position in a trajectory."""


@pytest.fixture
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.5,
        tie_word_embeddings=False,
    )
    llama = LlamaForCausalLM(config)
    utils.add_fused_lm_head(llama, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    return llama


def batch() -> tuple[Tensor, Tensor, list[LeftTokens]]:
    """Tokens and attention mask, (B, T), and for each sample the tokens that sampling left at every second position."""
    random = np.random.default_rng(4)
    tokens = torch.from_numpy(random.integers(0, VOCABULARY, (2, COLUMNS)))
    attention_mask = torch.zeros(2, COLUMNS, dtype=torch.int64)
    left_tokens: list[LeftTokens] = []
    for row, sample in enumerate(SAMPLES):
        attention_mask[row, sample.start : sample.end] = 1
        of_sample = {}
        for position in sample.completion_positions[::2]:
            drawn = int(tokens[row, sample.start + position])
            further = random.integers(0, VOCABULARY, 7)
            of_sample[position] = np.unique([drawn, *further])
        left_tokens.append(of_sample)
    # The engine drew one token more than was trained.
    left_tokens[1][9] = np.array([3])
    return tokens, attention_mask, left_tokens


def trajectories(left_tokens: list[LeftTokens]) -> list[FinishedTrajectory]:
    """Trajectories of which the sampling mask alone is read."""
    finished = []
    for of_sample in left_tokens:
        sets = {position: (False, ids) for position, ids in of_sample.items()}
        mask = SamplingMask.of(VOCABULARY, sets)
        finished.append(FinishedTrajectory(small([]), np.zeros(3, np.float32), sampling_mask=mask))
    return finished


def scored(model: Any, tokens: Tensor, attention_mask: Tensor) -> Tensor:
    """log π of completions as TRL's trainer computes it, (B, SCORED)."""
    labels = tokens.masked_fill(attention_mask == 0, -100)
    labels[:, :FIRST_SCORED] = -100
    outputs = model(input_ids=tokens, attention_mask=attention_mask, labels=labels, fused_lm_head=True)
    # A row has one entry fewer than tokens, since no logits come before its first token.
    return outputs.log_probs[:, -SCORED:]


def dense(model: Any, tokens: Tensor, attention_mask: Tensor, left_tokens: list[LeftTokens]) -> Tensor:
    """The same from all logits; 0 where no token is scored."""
    logits = model(input_ids=tokens, attention_mask=attention_mask).logits / TEMPERATURE
    every_token = np.arange(VOCABULARY)
    log_probs = torch.zeros(2, SCORED)
    for row, sample in enumerate(SAMPLES):
        for position in sample.completion_positions:
            column = sample.start + position
            if column < FIRST_SCORED:
                continue
            row_logits = logits[row, column - 1]
            left = torch.from_numpy(left_tokens[row].get(position, every_token))
            normalizer = row_logits[left].logsumexp(0)
            log_probs[row, column - FIRST_SCORED] = row_logits[tokens[row, column]] - normalizer
    return log_probs


@pytest.mark.parametrize("compact", [False, True], ids=["all rows", "scored rows, as on a GPU"])
def test_values_and_gradients_are_those_of_the_renormalised_policy(
    compact: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utils, "_use_triton", lambda device: compact)
    tokens, attention_mask, left_tokens = batch()
    expected = dense(model, tokens, attention_mask, left_tokens)
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(2, SCORED, generator=generator)
    (expected * weights).sum().backward()
    expected_gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    with corrected_head(trajectories(left_tokens), attention_mask, SCORED):
        log_probs = scored(model, tokens, attention_mask)
    torch.testing.assert_close(log_probs, expected, rtol=0.0, atol=1e-5)
    (log_probs * weights).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected_gradients[name], rtol=1e-4, atol=1e-5)

    # Outside of the context TRL's log-probabilities are of the whole distribution again.
    uncorrected = scored(model, tokens, attention_mask)
    without_masks = dense(model, tokens, attention_mask, [{}, {}])
    torch.testing.assert_close(uncorrected, without_masks, rtol=0.0, atol=1e-5)
    assert float((uncorrected - expected).detach().abs().max()) > 0.1


def test_the_model_s_scale_and_soft_cap_of_logits_are_kept(model: Any) -> None:
    """30 tanh(0.25 z / 30) / 1.3, over three tokens of which the second was drawn."""
    _, attention_mask, _ = batch()
    three_left = trajectories([{2: np.array([5, 7, 11])}, {}])
    with corrected_head(three_left, attention_mask, SCORED):
        rows = 2 * (COLUMNS - 1)
        hidden = torch.randn(rows, 16)
        weight = torch.randn(VOCABULARY, 16)
        targets = torch.full((rows,), 7)
        log_probs, *_ = utils._ChunkedLogProbFunction.apply(
            hidden, weight, None, targets, TEMPERATURE, 32, 30.0, 0.25, ("entropy",)
        )
    # The token at position 2 of the first sample is in column 4, and column 3 chose it.
    products = weight[[5, 7, 11]] @ hidden[3]
    logits = 30.0 * torch.tanh(0.25 * products / 30.0) / TEMPERATURE
    expected = logits.log_softmax(0)[1]
    assert float(log_probs[3]) == pytest.approx(float(expected), abs=1e-5)


def test_a_token_that_was_cut_and_a_head_that_is_not_called_are_errors(model: Any) -> None:
    """So is a trajectory without a sampling mask."""
    tokens, attention_mask, left_tokens = batch()
    drawn = int(tokens[0, 4])
    without_drawn = trajectories([{2: np.array([(drawn + 1) % VOCABULARY])}, {}])
    correction = corrected_head(without_drawn, attention_mask, SCORED)
    with pytest.raises(RuntimeError, match="1 of 1 tokens"), correction:
        scored(model, tokens, attention_mask)

    correction = corrected_head(trajectories(left_tokens), attention_mask, SCORED)
    with pytest.raises(RuntimeError, match="did not come into effect"), correction:
        model(input_ids=tokens, attention_mask=attention_mask)

    without_mask = FinishedTrajectory(small([]), np.zeros(3, np.float32))
    correction = corrected_head([without_mask, None], attention_mask, SCORED)
    with pytest.raises(RuntimeError, match="came without their sampling mask"), correction:
        pass
