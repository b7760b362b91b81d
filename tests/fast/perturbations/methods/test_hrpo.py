# SPDX-License-Identifier: Apache-2.0
"""HRPO's gate by hand, how it starts, that it trains, and where its parameters are kept."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ngrpo.machine.storage import parameters_file
from ngrpo.trainers.openrlhf.model_actors import separate
from perturbations import InputEdit, Perturbation, Proposal, check_perturbation, create, parameters, register, replaying
from perturbations.base import Step
from perturbations.embeddings import matrix_embeddings
from perturbations.methods.learned import HybridGate
from perturbations.testing import PerturbationError
from tests.support.replay_examples import Embedder, small
from tests.support.strategy_steps import only_input, step_of

EMBEDDING = torch.tensor(
    [
        [1.0, 0.0],
        [0.0, 1.0],
        [2.0, 2.0],
        [-1.0, 1.0],
    ]
)


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        # r = (0.6·(1, 0) + 0.3·(0, 1) + 0.1·(2, 2)) / sqrt(0.46).
        pytest.param(4, torch.tensor([0.8, 0.5]) / 0.46**0.5, id="all tokens"),
        # r = (2/3, 1/3) / (sqrt(5)/3).
        pytest.param(2, torch.tensor([2.0, 1.0]) / 5.0**0.5, id="the two likeliest"),
    ],
)
def test_mixture_by_hand(k: int, expected: Tensor) -> None:
    """p = (0.6, 0.3, 0.1, 0) has the norm sqrt(0.46); the two likeliest alone, (2/3, 1/3), have sqrt(5)/3."""
    step = step_of([0.6, 0.3, 0.1, 0.0], sampled=2, embeddings=matrix_embeddings(EMBEDDING))
    proposal = create("hrpo", k=k).propose(step)
    assert proposal.tokens.tolist() == [2]
    assert proposal.edit.ids[0, 0].item() == 2, "the sampled token is the first candidate"
    assert proposal.edit.weights[0, 0].item() == 0.0
    assert proposal.edit.weights.norm().item() == pytest.approx(1.0)
    mixture = torch.tensor(only_input(proposal, step.embeddings))
    torch.testing.assert_close(mixture, expected)


# --- the gate --------------------------------------------------------------------------------------------


def test_gate_by_hand() -> None:
    """D = 2, e = (1, 2), r = (3, -1).

    W_r = [[0, 0], [ln 3, 0]]: σ(W_r e) = (1/2, 3/4), as σ(ln 3) = 3/4.
    Λ_j with softplus(Λ_j) = ln(1 + e^Λ_j): the first ln 2 / 4, the second ln 2 / 12, so that
      a_1 = exp(−8 · ln 2/4 · 1/2) = exp(−ln 2) = 1/2, and a_2 = exp(−8 · ln 2/12 · 3/4) = exp(−ln 2 / 2) = 1/√2.
    W_i = [[0, ln 3 / 2], [0, 0]]: σ(W_i e) = (3/4, 1/2).
    e'_1 = 1/2 · 1 + sqrt(1 − 1/4) · 3/4 · 3 = 1/2 + 9 sqrt(3) / 8
    e'_2 = 1/√2 · 2 + sqrt(1 − 1/2) · 1/2 · (−1) = √2 − 1 / (2 √2) = 3 / (2 √2).
    """
    gate = HybridGate(2, 0.99)
    softplus = torch.tensor([math.log(2) / 4, math.log(2) / 12])
    gate.lambda_start = softplus.expm1().log()
    gate.w_r.data[1, 0] = math.log(3)
    gate.w_i.data[0, 1] = math.log(3) / 2
    blended = gate(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]]))
    first = 0.5 + 9 * 3**0.5 / 8
    second = 3 / (2 * 2**0.5)
    torch.testing.assert_close(blended, torch.tensor([[first, second]]))


def test_the_gate_starts_near_the_token() -> None:
    """W = 0 gives σ = 1/2, and Λ a = exp(−8 softplus(Λ))^(1/2) in [sqrt(0.9), sqrt(0.999)], spread over the range."""
    gate = create("hrpo", start=0.9).module(4096)
    zeros = torch.zeros(1, 4096)
    ones = torch.ones(1, 4096)
    squared_a = gate(ones, zeros)[0].square()
    assert 0.9 <= squared_a.min().item() < 0.901
    assert 0.998 < squared_a.max().item() <= 0.99901
    assert squared_a.mean().item() == pytest.approx((0.9 + 0.999) / 2, abs=0.002)

    # What is left goes to r: e' = a e + sqrt(1 − a²) · r / 2.
    of_mixture = gate(zeros, ones)[0]
    torch.testing.assert_close(of_mixture, (1 - squared_a).sqrt() / 2, rtol=1e-3, atol=1e-6)


def test_bfloat16_parameters_change_nothing_at_the_start() -> None:
    token, mixture = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    module = create("hrpo").module(16)
    in_float32 = module(token, mixture)
    in_bfloat16 = module.to(torch.bfloat16)(token, mixture)
    assert torch.equal(in_float32, in_bfloat16)


# --- in a trained model ----------------------------------------------------------------------------------

TOKENS = torch.tensor([[0, 5, 6]])


def model_with_gate() -> Embedder:
    model = Embedder()
    model.embedding.weight.data.mul_(0.1)
    parameters.attach(model, create("hrpo"))
    return model


def test_every_parameter_trains() -> None:
    """Through a replayed model."""
    model = model_with_gate()
    with replaying(model, [small([1])]):
        model(TOKENS).square().sum().backward()
    by_name = dict(parameters.attached(model).named_parameters())
    assert set(by_name) == {"w_r", "w_i", "lambda_shift"}
    for name, parameter in by_name.items():
        assert parameter.grad.abs().max() > 0, name
    has_gradient = model.embedding.weight.grad.abs().sum(-1) > 0
    rows = has_gradient.nonzero().flatten().tolist()
    assert rows == [0, 1, 3, 6], "the token's and the candidates' rows, and not the replaced one"


def test_a_batch_without_a_perturbed_position_gives_gradients_of_zero_and_not_none() -> None:
    model = model_with_gate()
    with replaying(model, [None]):
        output = model(TOKENS)
    output.sum().backward()
    for parameter in parameters.attached(model).parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
    assert torch.equal(output, model.embedding(TOKENS))


def test_the_gate_is_for_the_bare_vectors_of_a_scaled_embedding() -> None:
    """Gemma multiplies its embeddings by s: e' = s · gate(e, r)."""
    model = model_with_gate()
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters.attached(model).parameters():  # at W = 0 the gate is linear
        parameter.data.normal_(generator=generator)
    with replaying(model, [small([1])]):
        bare = model(TOKENS)
    model.embedding.register_forward_hook(lambda module, inputs, output: 3.0 * output)
    model.embedding.scalar_embed_scale = 3.0
    with replaying(model, [small([1])]):
        scaled = model(TOKENS)
    torch.testing.assert_close(scaled, 3.0 * bare)


def test_attach_returns_the_attached_module() -> None:
    model = Embedder()
    module = parameters.attach(model, create("hrpo"))
    assert module is parameters.attached(model)


# --- files and names -------------------------------------------------------------------------------------


def test_saved_parameters_are_loaded_in_float32(tmp_path: Path) -> None:
    hrpo = create("hrpo")
    module = hrpo.module(4)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    module.to(torch.bfloat16)
    parameters_file.save(tmp_path, hrpo, module.state_dict())
    top_level = [path.name for path in tmp_path.iterdir()]
    assert top_level == ["perturbation"], "nothing at the top, where vLLM reads every file"

    loaded = hrpo.module(4)
    assert parameters_file.load_saved(loaded, hrpo, str(tmp_path))
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.float())


def test_nothing_is_loaded_where_nothing_was_saved(tmp_path: Path) -> None:
    hrpo = create("hrpo")
    assert not parameters_file.load_saved(hrpo.module(4), hrpo, str(tmp_path))


def test_parameters_of_another_run_are_refused(tmp_path: Path) -> None:
    hrpo = create("hrpo")
    parameters_file.save(tmp_path, hrpo, hrpo.module(4).state_dict())
    with pytest.raises(ValueError, match=r"trained with start=0.99, this run has start=0.9\b.*saved value"):
        parameters_file.load_saved(hrpo.module(4), create("hrpo", start=0.9), str(tmp_path))
    with pytest.raises(ValueError, match="trained with name='hrpo', this run has name='scaled'"):
        parameters_file.load_saved(Scale(4), Scaled(), str(tmp_path))
    with pytest.raises(ValueError, match=r"shape \(5,\), the saved one \(4,\).*another hidden size"):
        parameters_file.load_saved(hrpo.module(5), hrpo, str(tmp_path))


def test_names_that_are_not_the_modules() -> None:
    module = create("hrpo").module(2)
    with pytest.raises(ValueError, match=r"unknown \['w_x'\], missing \['lambda_shift', 'w_i', 'w_r'\]"):
        parameters.load(module, {"w_x": torch.zeros(1)})


def test_split_keeps_the_models_tensors_in_order() -> None:
    tensors = [(name, torch.zeros(1)) for name in ("a", "perturbation.w_r", "b", "perturbationist")]
    own: dict[str, Tensor] = {}
    of_model = [name for name, _ in parameters.split(tensors, own)]
    assert of_model == ["a", "b", "perturbationist"]
    assert list(own) == ["w_r"]


def test_learning_rates_make_groups() -> None:
    plain = nn.Parameter(torch.zeros(1))
    fast = nn.Parameter(torch.zeros(1))
    slow = nn.Parameter(torch.zeros(1))
    fast_without_decay = nn.Parameter(torch.zeros(1))
    groups = [
        {"params": [plain, fast, slow], "weight_decay": 0.1},
        {"params": [fast_without_decay], "weight_decay": 0.0},
    ]
    rates = {
        id(fast): 1e-3,
        id(slow): 1e-4,
        id(fast_without_decay): 1e-3,
    }
    separated = separate(groups, rates)
    rates_and_sizes = [(group.get("lr"), len(group["params"])) for group in separated]
    assert rates_and_sizes == [(None, 1), (1e-3, 2), (1e-4, 1)]


def test_a_parameter_without_a_rate_has_the_policy_s() -> None:
    hrpo = create("hrpo", gate_lr="none")
    assert hrpo.learning_rate("w_r") is None
    assert hrpo.learning_rate("lambda_shift") == 1e-3


# --- a third party's perturbation with parameters --------------------------------------------------------


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

    def forward(self, token: Tensor, mixture: Tensor) -> Tensor:
        return self.scale.float() * mixture


def test_a_third_partys_perturbation_with_parameters_conforms() -> None:
    check_perturbation(Scaled)


def in_the_parameters_dtype(self: Scale, token: Tensor, mixture: Tensor) -> Tensor:
    return self.scale * mixture.to(self.scale.dtype)


def summed_over_rows(self: Scale, token: Tensor, mixture: Tensor) -> Tensor:
    return self.scale.float() * mixture.sum(0)


def without_gradient(self: Scale, token: Tensor, mixture: Tensor) -> Tensor:
    return mixture + 0.0 * self.scale.detach().float()


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (in_the_parameters_dtype, "compute in float32"),
        (summed_over_rows, "one row for each position"),
        (without_gradient, "no finite gradient reaches scale"),
    ],
)
def test_a_bad_module_is_explained(forward: Callable, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scale, "forward", forward)
    with pytest.raises(PerturbationError, match=message):
        check_perturbation(Scaled)
