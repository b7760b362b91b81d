# SPDX-License-Identifier: Apache-2.0
"""HRPO's gate by hand, how it starts, that it trains, and where its parameters are kept."""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from ngrpo.machine.storage import parameters_file
from perturbations import InputEdit, Perturbation, Proposal, check_perturbation, create, parameters, register, replaying
from perturbations.base import Step
from perturbations.edit import realise
from perturbations.embeddings import matrix_embeddings
from perturbations.methods.learned import HybridGate
from perturbations.testing import PerturbationError
from tests.support.replay_examples import Embedder, small
from tests.support.strategy_steps import step_of

EMBEDDING = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0], [-1.0, 1.0]])


def test_mixture_by_hand() -> None:
    """p = (0.6, 0.3, 0.1, 0) has the norm sqrt(0.46); the two likeliest alone, (2/3, 1/3), have sqrt(5)/3.

    All: r = (0.6·(1, 0) + 0.3·(0, 1) + 0.1·(2, 2)) / sqrt(0.46) = (0.8, 0.5) / sqrt(0.46).
    Two: r = (2/3, 1/3) / (sqrt(5)/3) = (2, 1) / sqrt(5).
    """
    step = step_of([0.6, 0.3, 0.1, 0.0], sampled=2, embeddings=matrix_embeddings(EMBEDDING))
    for k, want in ((4, torch.tensor([0.8, 0.5]) / 0.46**0.5), (2, torch.tensor([2.0, 1.0]) / 5.0**0.5)):
        proposal = create("hrpo", k=k).propose(step)
        assert proposal.tokens.tolist() == [2]
        assert proposal.edit.ids[0, 0].item() == 2, "the sampled token is the first candidate"
        assert proposal.edit.weights[0, 0].item() == 0.0
        mixture = realise(proposal.edit, step.embeddings.lookup, None)[0]
        torch.testing.assert_close(mixture, want)
        assert proposal.edit.weights.norm().item() == pytest.approx(1.0)


def test_gate_by_hand() -> None:
    """D = 2, e = (1, 2), r = (3, -1).

    W_r = [[0, 0], [ln 3, 0]]: σ(W_r e) = (1/2, 3/4), as σ(ln 3) = 3/4.
    Λ_j with softplus(Λ_j) = ln(1 + e^Λ_j): the first ln 2 / 4, the second ln 2 / 12, so that
      a_1 = exp(−8 · ln 2/4 · 1/2) = exp(−ln 2) = 1/2, and a_2 = exp(−8 · ln 2/12 · 3/4) = exp(−ln 2 / 2) = 1/√2.
    W_i = [[0, ln 3 / 2], [0, 0]]: σ(W_i e) = (3/4, 1/2).
    e'_1 = 1/2 · 1 + sqrt(1 − 1/4) · 3/4 · 3 = 1/2 + 9 sqrt(3) / 8
    e'_2 = 1/√2 · 2 + sqrt(1 − 1/2) · 1/2 · (−1) = √2 − 1 / (2 √2) = 3 / (2 √2).
    """
    softplus = [math.log(2) / 4, math.log(2) / 12]
    gate = HybridGate(2, 0.99)
    gate.lambda_start = torch.tensor([math.log(math.expm1(s)) for s in softplus])
    gate.w_r.data[1, 0], gate.w_i.data[0, 1] = math.log(3), math.log(3) / 2
    got = gate(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]]))
    want = torch.tensor([[0.5 + 9 * 3**0.5 / 8, 3 / (2 * 2**0.5)]])
    torch.testing.assert_close(got, want)


def test_it_starts_near_the_token() -> None:
    """W = 0 gives σ = 1/2, and Λ a = exp(−8 softplus(Λ))^(1/2) in [sqrt(0.9), sqrt(0.999)], spread over the range."""
    gate = create("hrpo", start=0.9).module(4096)
    a = gate(torch.ones(1, 4096), torch.zeros(1, 4096))[0].square()
    assert 0.9 <= a.min().item() < 0.901 and 0.998 < a.max().item() <= 0.99901
    assert a.mean().item() == pytest.approx((0.9 + 0.999) / 2, abs=0.002)
    # What is left goes to r: e' = a e + sqrt(1 − a²) · r / 2.
    blended = gate(torch.zeros(1, 4096), torch.ones(1, 4096))[0]
    torch.testing.assert_close(blended, (1 - a).sqrt() / 2, rtol=1e-3, atol=1e-6)


def test_bfloat16_parameters_change_nothing_at_the_start() -> None:
    token, mixture = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    module = create("hrpo").module(16)
    before = module(token, mixture)
    assert torch.equal(before, module.to(torch.bfloat16)(token, mixture))


def test_every_parameter_trains_and_the_shift_of_lambda_is_small_steps() -> None:
    """Through a replayed model; a batch without a perturbed position gives gradients of zero, not none."""
    model = Embedder()
    model.embedding.weight.data.mul_(0.1)
    parameters.attach(model, create("hrpo"))
    tokens = torch.tensor([[0, 5, 6]])
    with replaying(model, [small([1])]):
        model(tokens).square().sum().backward()
    parts = dict(parameters.attached(model).named_parameters())
    assert set(parts) == {"w_r", "w_i", "lambda_shift"}
    assert all(p.grad.abs().max() > 0 for p in parts.values())
    touched = model.embedding.weight.grad.abs().sum(-1).nonzero().flatten().tolist()
    assert touched == [0, 1, 3, 6], "the token's and the candidates' rows, and not the replaced one"
    model.zero_grad()
    with replaying(model, [None]):
        output = model(tokens)
    output.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in parts.values())
    assert torch.equal(output, model.embedding(tokens))


def test_a_scaled_embedding() -> None:
    """Gemma multiplies its embeddings by s: the gate is for the bare ones, e' = s · gate(e, r)."""
    model, generator = Embedder(), torch.Generator().manual_seed(0)
    model.embedding.weight.data.mul_(0.1)
    module = parameters.attach(model, create("hrpo"))
    for parameter in module.parameters():  # at W = 0 the gate is linear
        parameter.data.normal_(generator=generator)
    with replaying(model, [small([1])]):
        bare = model(torch.tensor([[0, 5, 6]]))
    model.embedding.register_forward_hook(lambda m, i, o: 3.0 * o)
    model.embedding.scalar_embed_scale = 3.0
    with replaying(model, [small([1])]):
        torch.testing.assert_close(model(torch.tensor([[0, 5, 6]])), 3.0 * bare)
    assert module is parameters.attached(model)


def test_save_and_load(tmp_path: Path) -> None:
    perturbation = create("hrpo")
    module = perturbation.module(4)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    module.to(torch.bfloat16)
    assert not parameters_file.load_saved(perturbation.module(4), perturbation, str(tmp_path)), "nothing is there yet"
    parameters_file.save(tmp_path, perturbation, module.state_dict())
    assert [p.name for p in tmp_path.iterdir()] == ["perturbation"], "nothing at the top, where vLLM reads every file"
    again = perturbation.module(4)
    assert parameters_file.load_saved(again, perturbation, str(tmp_path))
    for name, value in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.float())
    with pytest.raises(ValueError, match=r"trained with start=0.99, this run has start=0.9\b.*saved value"):
        parameters_file.load_saved(again, create("hrpo", start=0.9), str(tmp_path))
    with pytest.raises(ValueError, match="trained with name='hrpo', this run has name='scaled'"):
        parameters_file.load_saved(Scale(4), Scaled(), str(tmp_path))
    with pytest.raises(ValueError, match=r"shape \(5,\), the saved one \(4,\).*another hidden size"):
        parameters_file.load_saved(perturbation.module(5), perturbation, str(tmp_path))


def test_names_that_are_not_the_modules() -> None:
    module = create("hrpo").module(2)
    with pytest.raises(ValueError, match=r"unknown \['w_x'\], missing \['lambda_shift', 'w_i', 'w_r'\]"):
        parameters.load(module, {"w_x": torch.zeros(1)})


def test_split_keeps_the_models_tensors_in_order() -> None:
    own: dict[str, torch.Tensor] = {}
    tensors = [(name, torch.zeros(1)) for name in ("a", "perturbation.w_r", "b", "perturbationist")]
    assert [name for name, _ in parameters.split(tensors, own)] == ["a", "b", "perturbationist"]
    assert list(own) == ["w_r"]


def test_learning_rates_make_groups() -> None:
    from ngrpo.trainers.openrlhf.model_actors import separate

    a, b, c, d = (nn.Parameter(torch.zeros(1)) for _ in range(4))
    groups = [{"params": [a, b, c], "weight_decay": 0.1}, {"params": [d], "weight_decay": 0.0}]
    rates = {id(b): 1e-3, id(c): 1e-4, id(d): 1e-3}
    result = separate(groups, rates)
    assert [(g.get("lr"), len(g["params"])) for g in result] == [(None, 1), (1e-3, 2), (1e-4, 1)]
    perturbation = create("hrpo", gate_lr="none")
    assert (perturbation.learning_rate("w_r"), perturbation.learning_rate("lambda_shift")) == (None, 1e-3)


@register("scaled")
@dataclass(frozen=True, kw_only=True)
class Scaled(Perturbation):
    """The perturbation with parameters of docs/own_perturbation.md."""

    def propose(self, step: Step) -> Proposal:
        values, ids = step.logits.topk(8, dim=-1)
        return Proposal(InputEdit(ids, torch.softmax(values, dim=-1)), step.sampled)

    def module(self, hidden_size: int) -> nn.Module:
        return Scale(hidden_size)


class Scale(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size))

    def forward(self, token: torch.Tensor, mixture: torch.Tensor) -> torch.Tensor:
        return self.scale.float() * mixture


def test_a_third_partys_perturbation_with_parameters_conforms() -> None:
    check_perturbation(Scaled)


BAD_FORWARDS = {
    "compute in float32": lambda self, token, mixture: self.scale * mixture.to(self.scale.dtype),
    "each row": lambda self, token, mixture: self.scale.float() * mixture.sum(0),
    "no finite gradient reaches scale": lambda self, token, mixture: mixture + 0.0 * self.scale.detach().float(),
}


@pytest.mark.parametrize("words", BAD_FORWARDS)
def test_a_bad_module_is_explained(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setattr(Scale, "forward", BAD_FORWARDS[words])
    with pytest.raises(PerturbationError, match=words):
        check_perturbation(Scaled)
