# SPDX-License-Identifier: Apache-2.0
"""Routing replay: recorded experts in the routers of transformers, as bytes, through turns, and its refusals."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.models.tiny import random_model
from ngrpo.config import parse, rules
from ngrpo.config.complete_run import CompleteRun
from ngrpo.machine.models import experts
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.rollout.settings import check_engine, read
from ngrpo.trainers.common.sample_records import Conversation, routed, unpack
from perturbations import FinishedTrajectory
from perturbations.errors import UsageError
from perturbations.replay import packing
from perturbations.replay.routing import RecordedChoice, RoutingScope, routers
from tests.support.replay_examples import a_record
from tests.support.run import run_of

TYPES = ["qwen2_moe", "qwen3_moe", "qwen3_next", "mixtral", "glm4_moe", "gpt_oss", "olmoe", "granitemoe"]
TYPES += ["deepseek_v2", "deepseek_v3", "ernie4_5_moe", "minimax_m2", "llama4_text"]


class Softmax(nn.Module):
    """A router whose scores are its input, renormalised over the K experts."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.num_experts = 2, 3
        self.weight = nn.Parameter(torch.eye(3))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.topk(hidden @ self.weight.T, 2, dim=-1)
        return chosen.values.softmax(dim=-1), chosen.indices


def test_the_scores_weigh_the_recorded_experts() -> None:
    """Scores 2, 1 and 0; experts 0 and 2 were recorded: y = (e² · 1 + e⁰ · 100) / (e² + e⁰)."""
    model = nn.ModuleDict({"router": Softmax()})
    hidden, mask = torch.tensor([[2.0, 1.0, 0.0]]), torch.ones(1, 1, dtype=torch.int64)

    def output() -> Tensor:
        weights, chosen = model.router(hidden)
        return (weights * torch.tensor([1.0, 10.0, 100.0])[chosen]).sum()

    own = (np.e**2 * 1 + np.e * 10) / (np.e**2 + np.e)
    assert output().item() == pytest.approx(own, rel=1e-6)
    with RoutingScope(model)([np.array([[[0, 2]]], dtype=np.uint8)], mask):
        replayed = output()
    assert replayed.item() == pytest.approx((np.e**2 + 100) / (np.e**2 + 1), rel=1e-6)
    replayed.backward()
    # dy/ds_0 = g_0 g_2 (1 − 100), dy/ds_2 the opposite, and none of the expert that was not recorded.
    share = np.e**2 / (np.e**2 + 1) * (1 / (np.e**2 + 1)) * 99
    assert model.router.weight.grad[:, 0].tolist() == pytest.approx([-2 * share, 0.0, 2 * share], rel=1e-5)
    assert output().item() == pytest.approx(own, rel=1e-6), "nothing is left behind"


class TwoChoices(Softmax):
    """A router that chooses twice, as one with a choice of its own for shared experts would."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        torch.topk(hidden, 2, dim=-1)
        return super().forward(hidden)


def test_a_router_that_chooses_twice_is_refused() -> None:
    model, mask = nn.ModuleDict({"router": TwoChoices()}), torch.ones(1, 1, dtype=torch.int64)
    with pytest.raises(UsageError, match="TwoChoices chooses its experts by topk 2 times, not once"):  # noqa: SIM117
        with RoutingScope(model)([np.array([[[0, 2]]], dtype=np.uint8)], mask):
            model.router(torch.tensor([[2.0, 1.0, 0.0]]))


def test_an_outer_scope_replays_again_after_an_inner_one() -> None:
    model, mask = nn.ModuleDict({"router": Softmax()}), torch.ones(1, 1, dtype=torch.int64)
    outer, inner = (np.array([[experts]], dtype=np.uint8) for experts in ([0, 2], [1, 2]))
    hidden = torch.tensor([[2.0, 1.0, 0.0]])
    with RoutingScope(model)([outer], mask):
        with RoutingScope(model)([inner], mask):
            model.router(hidden)
        assert model.router(hidden)[1].tolist() == [[0, 2]]
    assert model.router(hidden)[1].tolist() == [[0, 1]]


def choices(model: Any, tokens: Tensor, mask: Tensor) -> np.ndarray:
    """The experts that a model's own routers choose, (B, T, L, K)."""
    seen = []

    class Noted(RecordedChoice):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            before = self.choices
            result = super().__torch_function__(func, types, args, kwargs)
            if self.choices > before:
                seen.append(result.indices)
            return result

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("perturbations.replay.routing.RecordedChoice", Noted)
        with RoutingScope(model)([None] * len(tokens), mask):
            model(tokens, attention_mask=mask)
    return torch.stack(seen, dim=1).view(*tokens.shape, len(seen), -1).numpy()


@pytest.mark.parametrize("model_type", TYPES)
def test_every_type_of_router(model_type: str) -> None:
    """Its own experts give its own forward bit for bit; others change it, with gradient to every router."""
    model = random_model(model_type)[1]
    tokens = torch.arange(3, 27).view(2, 12)
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        plain = model(tokens).logits
    own = choices(model, tokens, mask)
    with torch.no_grad(), RoutingScope(model)(list(own), mask):
        assert torch.equal(model(tokens).logits, plain)
    with RoutingScope(model)([*((own + 1) % routers(model)[0].num_experts)], mask):
        replayed = model(tokens).logits
    assert (replayed - plain).abs().max() > 0.01
    replayed.square().mean().backward()
    assert all(bool(router.weight.grad.any()) for router in routers(model))


@pytest.fixture(scope="module")
def mixture() -> Any:
    return random_model("qwen3_moe")[1]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_and_cut_trajectories(mixture: Any, side: str) -> None:
    """A row's experts are found from its first real token; behind its record the model routes as it does."""
    lengths, tokens = (12, 7), torch.arange(3, 27).view(2, 12)
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    mask, tokens = (mask, tokens) if side == "left" else (mask.flip(1), tokens.flip(1))
    rng = np.random.default_rng(0)
    experts = [np.argsort(rng.random((length - 2, 2, 4)))[:, :, :2].astype(np.uint8) for length in lengths]
    with torch.no_grad():
        with RoutingScope(mixture)(experts, mask):
            together = mixture(tokens, attention_mask=mask).logits
        for row, length in enumerate(lengths):
            alone = tokens[row : row + 1, mask[row].bool()]
            with RoutingScope(mixture)(experts[row : row + 1], torch.ones_like(alone)):
                assert (mixture(alone).logits[0] - together[row, mask[row].bool()]).abs().max() < 1e-4
            assert (mixture(alone).logits[0] - together[row, mask[row].bool()]).abs().max() > 0.01, length


def test_a_packed_batch(mixture: Any) -> None:
    """(1, total): rows of a batch's samples one after the other, as flash attention takes them."""
    router, hidden = routers(mixture)[0], torch.randn(5, 128)
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    experts = [np.array([[[0, 1]] * 2] * 2), np.array([[[2, 3]] * 2] * 2)]
    with RoutingScope(mixture)(experts, mask):
        chosen = router(hidden)[2]
    own = router(hidden)[2]
    assert chosen.tolist() == [[0, 1], [0, 1], [2, 3], [2, 3], own[4].tolist()]


def test_a_checkpointed_layer_replays_again() -> None:
    gradients = []
    for checkpointed in (False, True):
        model = random_model("qwen3_moe")[1].train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        tokens = torch.arange(3, 15)[None]
        mask = torch.ones_like(tokens)
        other = list((choices(model, tokens, mask) + 1) % 4)
        with RoutingScope(model)(other, mask):
            model(tokens, attention_mask=mask).logits.square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, another) for one, another in zip(*gradients))


def test_groups_of_recorded_experts_stay_open() -> None:
    """DeepSeek V2 sends a token to the experts of its best groups: the recorded ones keep their own weights."""
    model, _ = random_model("deepseek_v2")[1], torch.manual_seed(0)
    (router, *_) = routers(model)
    router.topk_method, router.num_group, router.topk_group = "group_limited_greedy", 2, 1
    hidden = torch.randn(6, router.hidden_dim)
    logits, weights, own = router(hidden)
    other = (own + router.num_experts // 2) % router.num_experts
    with RecordedChoice(other, router.num_experts):
        _, replayed, chosen = router(hidden)
    assert (chosen == other).all() and (own // 2 != other // 2).all()
    expected = logits.softmax(dim=-1).gather(1, other) * router.routed_scaling_factor
    assert torch.equal(replayed, expected) and bool((weights != replayed).any())


@pytest.mark.parametrize("model_type", ["llama", "phimoe", "jamba"])
def test_other_routers_are_refused(model_type: str) -> None:
    model, tokens = random_model(model_type)[1], torch.arange(3, 9)[None]
    refused = pytest.raises(UsageError, match=r"--replay\.routing: .*Leave the flag out")
    with refused, RoutingScope(model)([None], torch.ones_like(tokens)):
        model(tokens)


def test_experts_of_another_model_are_refused(mixture: Any) -> None:
    recorded, mask = np.zeros((4, 3, 2), np.uint8), torch.ones(1, 4)
    refused = pytest.raises(ValueError, match="recorded are 3 layers with 2 experts a token, the model has 2 with 2")
    with refused, RoutingScope(mixture)([recorded], mask):
        pass
    refused = pytest.raises(ValueError, match="recorded are 2 layers with 3 experts a token, the model has 2 with 2")
    with refused, RoutingScope(mixture)([np.zeros((4, 2, 3), np.uint8)], mask):
        pass


# ---- on the way from the engine ----------------------------------------------------------------------------------


def trajectory(prompt: int, tokens: int, experts: np.ndarray | None) -> FinishedTrajectory:
    record = a_record(0, prompt_tokens=prompt, num_tokens=tokens)
    return FinishedTrajectory(record, np.zeros(tokens - prompt, np.float32), experts=experts)


@pytest.mark.parametrize(("dtype", "most"), [(np.uint8, 255), (np.uint16, 511)])
def test_as_bytes(dtype: Any, most: int) -> None:
    """One byte for each layer and expert of a token up to 256 experts, two above."""
    experts = np.random.default_rng(0).integers(0, most + 1, (7, 3, 2)).astype(dtype)
    whole = trajectory(4, 8, experts)
    parts = whole.pack()
    assert len(parts[packing.EXPERTS]) == 7 * 3 * 2 * np.dtype(dtype).itemsize + 4 + 4
    found = FinishedTrajectory.unpack(parts).experts
    assert found.dtype == dtype and (found == experts).all()
    assert (whole.truncate(5).experts == experts[:5]).all()
    assert whole.size - trajectory(4, 8, None).size == experts.nbytes
    with pytest.raises(ValueError, match="routed_experts is damaged"):
        FinishedTrajectory.unpack({**parts, packing.EXPERTS: parts[packing.EXPERTS][:-5]})
    assert routed(unpack([parts, parts]), 2)[1].shape == (7, 3, 2)
    with pytest.raises(RuntimeError, match="1 of 2 samples came without their experts"):
        routed(unpack([parts, trajectory(4, 8, None).pack()]), 2)


def test_turns_keep_the_experts_that_their_tokens_were_drawn_with() -> None:
    first, second = np.full((6, 1, 1), 1, np.uint8), np.full((11, 1, 1), 2, np.uint8)
    conversation = Conversation({})
    conversation.add(trajectory(3, 7, first).pack(), [1, 2, 3], [4, 5, 6, 7])
    prompt = [1, 2, 3, 4, 5, 9, 7, 8]  # the sixth token was changed
    conversation.go_on(prompt)
    assert len(conversation.trajectory.experts) == 5
    conversation.add(trajectory(8, 12, second).pack(), prompt, [4, 5, 6, 7])
    assert conversation.trajectory.experts.ravel().tolist() == [1] * 5 + [2] * 6


# ---- the flag ----------------------------------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize("model_type", [*TYPES, "afmoe", "hunyuan_v1_moe"])
def test_routers_are_known_by_the_config_json(model_type: str, tmp_path: Path) -> None:
    config, _ = random_model(model_type)
    config.save_pretrained(tmp_path)
    experts.check(tmp_path / "config.json", replayed=False)
    if model_type in TYPES:
        experts.check(tmp_path / "config.json", replayed=True)
    else:
        with pytest.raises(UsageError, match="has no router with `top_k` and `num_experts`"):
            experts.check(tmp_path / "config.json", replayed=True)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"num_experts": 4, "num_experts_per_tok": 8},
            "num_experts_per_tok 8 is more than num_experts 4: .* most 4",
        ),
        ({"num_local_experts": 2, "num_experts_per_tok": 3}, "more than num_local_experts 2"),
        ({"text_config": {"n_routed_experts": 2, "num_experts_per_tok": 3}}, "more than n_routed_experts 2"),
        ({"num_experts": 4, "num_experts_per_tok": 4}, None),
        ({"num_experts_per_tok": 4}, None),
    ],
)
def test_more_chosen_experts_than_there_are(values: dict[str, Any], said: str | None, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **values}))
    if said is None:
        experts.check(path, replayed=False)
        return
    with pytest.raises(UsageError, match=said):
        experts.check(path, replayed=False)
    flags = Flags(["--actor.model_name_or_path", str(tmp_path)])
    with pytest.raises(UsageError, match=said):
        rules.check_support(CompleteRun(run=run_of(), flags=flags))


def test_a_dense_model_is_refused(smollm2: str) -> None:
    words = ["--model", "smollm2-135m", "--task", "arithmetic", "--preset", "grpo", "--replay.routing"]
    with pytest.raises(UsageError, match=r"which is dense, cannot be used with --replay\.routing"):
        rules.checked(parse.run_config(words))


def test_an_engine_takes_its_own_record_or_ours() -> None:
    config = {"routed_experts": True}
    perturbation = read(config)
    assert perturbation is not None and not perturbation.active
    with pytest.raises(UsageError, match=r"additional_config\['routed_experts'\]=1: must be True or False"):
        read({"routed_experts": 1})
    theirs = SimpleNamespace(enable_return_routed_experts=True, is_moe=True, runner_type="generate")
    one_rank = SimpleNamespace(data_parallel_size=1)
    engine = SimpleNamespace(model_config=theirs, parallel_config=one_rank, additional_config=config)
    with pytest.raises(UsageError, match="a router hands its experts to vLLM or to ngrpo"):
        check_engine(engine, perturbation)
