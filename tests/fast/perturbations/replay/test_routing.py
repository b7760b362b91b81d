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
from ngrpo.machine.models import experts as model_experts
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.rollout.settings import check_engine, read
from ngrpo.trainers.common.sample_records import Conversation, routed, unpack
from perturbations import FinishedTrajectory
from perturbations.errors import UsageError
from perturbations.replay import packing
from perturbations.replay.routing import RecordedChoice, RoutingScope, routers
from tests.support.replay_examples import a_record
from tests.support.run import run_of

TYPES = [
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "mixtral",
    "glm4_moe",
    "gpt_oss",
    "olmoe",
    "granitemoe",
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5_moe",
    "minimax_m2",
    "llama4_text",
]

# --- one router ------------------------------------------------------------------------------------------


class Softmax(nn.Module):
    """A router of three experts whose scores are its input, renormalised over the K = 2 chosen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 2
        self.num_experts = 3
        self.weight = nn.Parameter(torch.eye(3))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.topk(hidden @ self.weight.T, 2, dim=-1)
        return chosen.values.softmax(dim=-1), chosen.indices


class TwoChoices(Softmax):
    """A router that chooses twice, as one with a choice of its own for shared experts would."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        torch.topk(hidden, 2, dim=-1)
        return super().forward(hidden)


# Of one token: its own two experts are 0 and 1.
SCORES = torch.tensor([[2.0, 1.0, 0.0]])
ONE_TOKEN = torch.ones(1, 1, dtype=torch.int64)
OUTPUT_OF_EXPERT = torch.tensor([1.0, 10.0, 100.0])


def experts_of_one_token(*experts: int) -> list[np.ndarray]:
    """The record of a batch of one token in one layer."""
    return [np.array([[experts]], dtype=np.uint8)]


def test_the_scores_weigh_the_recorded_experts() -> None:
    """Scores 2, 1 and 0; experts 0 and 2 were recorded: y = (e² · 1 + e⁰ · 100) / (e² + e⁰)."""
    model = nn.ModuleDict({"router": Softmax()})

    def output() -> Tensor:
        weights, chosen = model.router(SCORES)
        return (weights * OUTPUT_OF_EXPERT[chosen]).sum()

    with_own_experts = (np.e**2 * 1 + np.e * 10) / (np.e**2 + np.e)
    assert output().item() == pytest.approx(with_own_experts, rel=1e-6)

    with RoutingScope(model)(experts_of_one_token(0, 2), ONE_TOKEN):
        replayed = output()
    with_recorded_experts = (np.e**2 + 100) / (np.e**2 + 1)
    assert replayed.item() == pytest.approx(with_recorded_experts, rel=1e-6)
    assert output().item() == pytest.approx(with_own_experts, rel=1e-6), "nothing is left behind"

    replayed.backward()
    # dy/ds_0 = g_0 g_2 (1 − 100), dy/ds_2 the opposite, and none of the expert that was not recorded.
    g_0 = np.e**2 / (np.e**2 + 1)
    g_2 = 1 / (np.e**2 + 1)
    of_score = 99 * g_0 * g_2
    gradient = model.router.weight.grad[:, 0].tolist()
    assert gradient == pytest.approx([-2 * of_score, 0.0, 2 * of_score], rel=1e-5)


def test_a_router_that_chooses_twice_is_refused() -> None:
    model = nn.ModuleDict({"router": TwoChoices()})
    message = "TwoChoices chooses its experts by topk 2 times, not once"
    with pytest.raises(UsageError, match=message), RoutingScope(model)(experts_of_one_token(0, 2), ONE_TOKEN):
        model.router(SCORES)


def test_an_outer_scope_replays_again_after_an_inner_one() -> None:
    model = nn.ModuleDict({"router": Softmax()})

    def chosen() -> list[list[int]]:
        _, experts = model.router(SCORES)
        return experts.tolist()

    with RoutingScope(model)(experts_of_one_token(0, 2), ONE_TOKEN):
        with RoutingScope(model)(experts_of_one_token(1, 2), ONE_TOKEN):
            chosen()
        assert chosen() == [[0, 2]]
    assert chosen() == [[0, 1]]


# --- the routers of transformers -------------------------------------------------------------------------


def own_choices(model: Any, tokens: Tensor, mask: Tensor) -> np.ndarray:
    """The experts that a model's own routers choose, (B, T, L, K)."""
    chosen_by_layer = []

    class NotedChoice(RecordedChoice):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            choices_before = self.choices
            result = super().__torch_function__(func, types, args, kwargs)
            if self.choices > choices_before:
                chosen_by_layer.append(result.indices)
            return result

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("perturbations.replay.routing.RecordedChoice", NotedChoice)
        with RoutingScope(model)([None] * len(tokens), mask):
            model(tokens, attention_mask=mask)
    layers = len(chosen_by_layer)
    return torch.stack(chosen_by_layer, dim=1).view(*tokens.shape, layers, -1).numpy()


@pytest.mark.parametrize("model_type", TYPES)
def test_every_type_of_router(model_type: str) -> None:
    """Its own experts give its own forward bit for bit; others change it, with gradient to every router."""
    _, model = random_model(model_type)
    tokens = torch.arange(3, 27).view(2, 12)
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        logits = model(tokens).logits
    own = own_choices(model, tokens, mask)
    with torch.no_grad(), RoutingScope(model)(list(own), mask):
        assert torch.equal(model(tokens).logits, logits)

    next_experts = (own + 1) % routers(model)[0].num_experts
    with RoutingScope(model)(list(next_experts), mask):
        replayed = model(tokens).logits
    assert (replayed - logits).abs().max() > 0.01
    replayed.square().mean().backward()
    for router in routers(model):
        assert router.weight.grad.any()


@pytest.fixture(scope="module")
def mixture() -> Any:
    """A Qwen3 of two layers with two of four experts for a token."""
    _, model = random_model("qwen3_moe")
    return model


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_and_cut_trajectories(mixture: Any, side: str) -> None:
    """A row's experts are found from its first real token; behind its record the model routes as it does.

    Two rows of 12 and 7 tokens, of which the last two are not recorded.
    """
    lengths = [12, 7]
    tokens = torch.arange(3, 27).view(2, 12)
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    if side == "right":
        tokens = tokens.flip(1)
        mask = mask.flip(1)
    generator = np.random.default_rng(0)
    experts = []
    for length in lengths:
        order = np.argsort(generator.random((length - 2, 2, 4)))
        experts.append(order[:, :, :2].astype(np.uint8))

    with torch.no_grad():
        with RoutingScope(mixture)(experts, mask):
            together = mixture(tokens, attention_mask=mask).logits
        for row in (0, 1):
            of_row = together[row, mask[row].bool()]
            tokens_of_row = tokens[row : row + 1, mask[row].bool()]
            with RoutingScope(mixture)(experts[row : row + 1], torch.ones_like(tokens_of_row)):
                alone = mixture(tokens_of_row).logits[0]
            assert (alone - of_row).abs().max() < 1e-4
            with_own_experts = mixture(tokens_of_row).logits[0]
            assert (with_own_experts - of_row).abs().max() > 0.01


def test_a_packed_batch(mixture: Any) -> None:
    """(1, total): rows of a batch's samples one after the other, as flash attention takes them.

    Two tokens are recorded of each sample; the last of the second sample is not.
    """
    router = routers(mixture)[0]
    hidden = torch.randn(5, 128)
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    tokens_and_layers = (2, 2, 1)
    experts = [
        np.tile(np.array([0, 1]), tokens_and_layers),
        np.tile(np.array([2, 3]), tokens_and_layers),
    ]
    with RoutingScope(mixture)(experts, mask):
        _, _, chosen = router(hidden)
    _, _, own = router(hidden)
    assert chosen[:2].tolist() == [[0, 1], [0, 1]]
    assert chosen[2:4].tolist() == [[2, 3], [2, 3]]
    assert chosen[4].tolist() == own[4].tolist()


def replayed_gradients(checkpointed: bool) -> list[Tensor | None]:
    """The gradients of a forward with other experts than the model's own."""
    _, model = random_model("qwen3_moe")
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    tokens = torch.arange(3, 15)[None]
    mask = torch.ones_like(tokens)
    next_experts = (own_choices(model, tokens, mask) + 1) % 4
    with RoutingScope(model)(list(next_experts), mask):
        model(tokens, attention_mask=mask).logits.square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_a_checkpointed_layer_replays_again() -> None:
    gradients = replayed_gradients(checkpointed=False)
    checkpointed_gradients = replayed_gradients(checkpointed=True)
    assert len(gradients) == len(checkpointed_gradients)
    for gradient, checkpointed_gradient in zip(gradients, checkpointed_gradients):
        assert torch.equal(gradient, checkpointed_gradient)


def test_groups_of_recorded_experts_stay_open() -> None:
    """DeepSeek V2 sends a token to the experts of its best groups: the recorded ones keep their own weights."""
    _, model = random_model("deepseek_v2")
    router = routers(model)[0]
    router.topk_method = "group_limited_greedy"
    router.num_group = 2
    router.topk_group = 1
    torch.manual_seed(0)
    hidden = torch.randn(6, router.hidden_dim)
    logits, own_weights, own_experts = router(hidden)

    of_the_other_group = (own_experts + router.num_experts // 2) % router.num_experts
    assert (own_experts // 2 != of_the_other_group // 2).all()
    with RecordedChoice(of_the_other_group, router.num_experts):
        _, weights, chosen = router(hidden)
    assert (chosen == of_the_other_group).all()
    probabilities = logits.softmax(dim=-1).gather(1, of_the_other_group)
    assert torch.equal(weights, probabilities * router.routed_scaling_factor)
    assert (own_weights != weights).any()


@pytest.mark.parametrize("model_type", ["llama", "phimoe", "jamba"])
def test_other_routers_are_refused(model_type: str) -> None:
    _, model = random_model(model_type)
    tokens = torch.arange(3, 9)[None]
    message = r"--replay\.routing: .*Leave the flag out"
    with pytest.raises(UsageError, match=message), RoutingScope(model)([None], torch.ones_like(tokens)):
        model(tokens)


@pytest.mark.parametrize(
    ("layers", "experts_per_token", "recorded"),
    [
        pytest.param(3, 2, "3 layers with 2 experts", id="layers"),
        pytest.param(2, 3, "2 layers with 3 experts", id="experts"),
    ],
)
def test_experts_of_another_model_are_refused(mixture: Any, layers: int, experts_per_token: int, recorded: str) -> None:
    experts = np.zeros((4, layers, experts_per_token), np.uint8)
    message = f"recorded are {recorded} a token, the model has 2 with 2"
    with pytest.raises(ValueError, match=message), RoutingScope(mixture)([experts], torch.ones(1, 4)):
        pytest.fail("replayed")


# --- on the way from the engine --------------------------------------------------------------------------


def trajectory(prompt: int, tokens: int, experts: np.ndarray | None) -> FinishedTrajectory:
    record = a_record(0, prompt_tokens=prompt, num_tokens=tokens)
    return FinishedTrajectory(record, np.zeros(tokens - prompt, np.float32), experts=experts)


@pytest.mark.parametrize(
    ("dtype", "largest", "bytes_per_expert"),
    [
        pytest.param(np.uint8, 255, 1, id="256 experts"),
        pytest.param(np.uint16, 511, 2, id="512 experts"),
    ],
)
def test_experts_as_bytes(dtype: Any, largest: int, bytes_per_expert: int) -> None:
    """One byte for each layer and expert of a token up to 256 experts, two above; 7 tokens, 3 layers, 2 experts."""
    generator = np.random.default_rng(0)
    experts = generator.integers(0, largest + 1, (7, 3, 2)).astype(dtype)
    finished = trajectory(4, 8, experts)
    packed = finished.pack()
    assert len(packed[packing.EXPERTS]) == 7 * 3 * 2 * bytes_per_expert + 4 + 4
    unpacked = FinishedTrajectory.unpack(packed).experts
    assert unpacked.dtype == dtype
    assert (unpacked == experts).all()
    assert (finished.truncate(5).experts == experts[:5]).all()
    assert finished.size - trajectory(4, 8, None).size == experts.nbytes


def test_damaged_experts_are_refused() -> None:
    packed = trajectory(4, 8, np.zeros((7, 3, 2), np.uint8)).pack()
    cut = packed[packing.EXPERTS][:-5]
    with pytest.raises(ValueError, match="routed_experts is damaged"):
        FinishedTrajectory.unpack({**packed, packing.EXPERTS: cut})


def test_all_samples_come_with_their_experts() -> None:
    with_experts = trajectory(4, 8, np.zeros((7, 3, 2), np.uint8)).pack()
    without_experts = trajectory(4, 8, None).pack()
    by_sample = routed(unpack([with_experts, with_experts]), 2)
    assert by_sample[1].shape == (7, 3, 2)
    with pytest.raises(RuntimeError, match="1 of 2 samples came without their experts"):
        routed(unpack([with_experts, without_experts]), 2)


def test_turns_keep_the_experts_that_their_tokens_were_drawn_with() -> None:
    """The first turn chose expert 1 for six tokens, the second expert 2 for eleven."""
    of_first_turn = np.full((6, 1, 1), 1, np.uint8)
    of_second_turn = np.full((11, 1, 1), 2, np.uint8)
    conversation = Conversation({})
    response = [4, 5, 6, 7]
    conversation.add(trajectory(3, 7, of_first_turn).pack(), [1, 2, 3], response)
    next_prompt = [1, 2, 3, 4, 5, 9, 7, 8]  # the sixth token was changed
    conversation.drop_changed(next_prompt)
    assert len(conversation.trajectory.experts) == 5
    conversation.add(trajectory(8, 12, of_second_turn).pack(), next_prompt, response)
    assert conversation.trajectory.experts.ravel().tolist() == [1] * 5 + [2] * 6


# --- the flag --------------------------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize("model_type", [*TYPES, "afmoe", "hunyuan_v1_moe"])
def test_routers_are_known_by_the_config_json(model_type: str, tmp_path: Path) -> None:
    config, _ = random_model(model_type)
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    model_experts.check(path, replayed=False)
    if model_type in TYPES:
        model_experts.check(path, replayed=True)
    else:
        with pytest.raises(UsageError, match="has no router with `top_k` and `num_experts`"):
            model_experts.check(path, replayed=True)


def write_config(folder: Path, values: dict[str, Any]) -> Path:
    """The config.json of a Qwen3 with these values."""
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **values}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param(
            {"num_experts": 4, "num_experts_per_tok": 8},
            "num_experts_per_tok 8 is more than num_experts 4: .* most 4",
            id="num_experts",
        ),
        pytest.param(
            {"num_local_experts": 2, "num_experts_per_tok": 3},
            "more than num_local_experts 2",
            id="num_local_experts",
        ),
        pytest.param(
            {"text_config": {"n_routed_experts": 2, "num_experts_per_tok": 3}},
            "more than n_routed_experts 2",
            id="n_routed_experts",
        ),
    ],
)
def test_more_chosen_experts_than_there_are(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_config(tmp_path, values)
    with pytest.raises(UsageError, match=message):
        model_experts.check(path, replayed=False)
    flags = Flags(["--actor.model_name_or_path", str(tmp_path)])
    with pytest.raises(UsageError, match=message):
        rules.check_support(CompleteRun(run=run_of(), flags=flags))


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"num_experts": 4, "num_experts_per_tok": 4}, id="all"),
        pytest.param({"num_experts_per_tok": 4}, id="of an unknown number"),
    ],
)
def test_as_many_chosen_experts_as_there_are(values: dict[str, Any], tmp_path: Path) -> None:
    model_experts.check(write_config(tmp_path, values), replayed=False)


def test_a_dense_model_is_refused(smollm2: str) -> None:
    words = ["--model", "smollm2-135m", "--task", "arithmetic", "--preset", "grpo", "--replay.routing"]
    with pytest.raises(UsageError, match=r"which is dense, cannot be used with --replay\.routing"):
        rules.checked(parse.run_config(words))


def test_the_engine_s_setting_is_a_truth_value() -> None:
    perturbation = read({"routed_experts": True})
    assert perturbation is not None
    assert not perturbation.active
    with pytest.raises(UsageError, match=r"additional_config\['routed_experts'\]=1: must be True or False"):
        read({"routed_experts": 1})


def test_an_engine_takes_its_own_record_or_ours() -> None:
    settings = {"routed_experts": True}
    engine = SimpleNamespace(
        model_config=SimpleNamespace(enable_return_routed_experts=True, is_moe=True, runner_type="generate"),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        additional_config=settings,
    )
    with pytest.raises(UsageError, match="a router hands its experts to vLLM or to ngrpo"):
        check_engine(engine, read(settings))
