# SPDX-License-Identifier: Apache-2.0
"""Which logits are left to the graph of a step, in vLLM's V2 runner, and what keeps them outside."""

from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ngrpo.rollout import runners
from ngrpo.rollout.output_layer import OutputLayer, output_layer_of

ROWS = 3
HIDDEN = 4
VOCABULARY = 8


class Model:
    """Its logits are the first hidden states, padded."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(hidden, (0, VOCABULARY - HIDDEN))


def output_layer_with_model() -> tuple[OutputLayer, Any]:
    model = Model()
    return OutputLayer(model, tensors=[], example=torch.zeros(1, HIDDEN), vocabulary=VOCABULARY), model


def test_logits_are_left_to_the_graph_once_and_within_the_context_only() -> None:
    layer, model = output_layer_with_model()
    hidden = torch.ones(ROWS, HIDDEN)
    assert model.compute_logits(hidden).sum() == ROWS * HIDDEN
    assert layer.take() is None
    with layer.left_to_graph():
        placeholder = model.compute_logits(hidden)
        assert placeholder.is_meta
        assert placeholder.shape == (ROWS, VOCABULARY)
        assert not model.compute_logits(hidden).is_meta, "logits of prompts follow"
        assert layer.take() is hidden
        assert layer.take() is None
    with layer.left_to_graph():
        model.compute_logits(hidden)
    assert layer.take() is None, "a step that failed leaves nothing to the next one"
    assert not model.compute_logits(hidden).is_meta
    with pytest.raises(NotImplementedError, match="meta"):
        placeholder.tolist()


# --- the requests ---------------------------------------------------------------------------------------------------


def sampler(**changes: Any) -> Any:
    """A V2 sampler with four slots; ``changes``: the slots of requests with a wish, by its name, and other fields."""
    slots_by_wish = {wish: changes.pop(wish, []) for wish in ("greedy", "logprobs", "token_ids", "processed")}

    def any_wants(wish: str) -> Callable[[np.ndarray], bool]:
        return lambda slots: bool(np.isin(slots, slots_by_wish[wish]).any())

    any_logprobs = any_wants("logprobs")
    any_token_ids = any_wants("token_ids")
    fields = {
        "compute_nans": False,
        "sampling_states": SimpleNamespace(
            any_greedy=any_wants("greedy"),
            max_num_logprobs=lambda slots: 0 if any_logprobs(slots) else -1,
        ),
        "logprob_token_ids_state": SimpleNamespace(max_num_token_ids=lambda slots: int(any_token_ids(slots))),
        "needs_logits_processing": np.isin(np.arange(4), slots_by_wish["processed"]),
    }
    return SimpleNamespace(**{**fields, **changes})


SLOTS = np.array([3, 1])
NONE = np.array([False, False])


def test_requests_that_change_nothing_draw_from_the_models_logits() -> None:
    assert runners.draws_from_unchanged_logits(sampler(), SLOTS, NONE)
    assert runners.draws_from_unchanged_logits(sampler(return_sampling_mask=False), SLOTS, NONE)
    others = {"greedy": [0], "logprobs": [2], "token_ids": [0], "processed": [0, 2]}
    assert runners.draws_from_unchanged_logits(sampler(**others), SLOTS, NONE), "they are not in this batch"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"greedy": [1]}, id="a greedy request"),
        pytest.param({"logprobs": [3]}, id="log-probabilities, if of the sampled token alone"),
        pytest.param({"token_ids": [1]}, id="log-probabilities of chosen tokens"),
        pytest.param({"processed": [3]}, id="penalties, bias, bad words, a temperature, filters"),
        pytest.param({"compute_nans": True}, id="NaNs are counted"),
        pytest.param({"return_sampling_mask": True}, id="vLLM's own masks"),
    ],
)
def test_logits_that_are_read_or_changed_stay_outside(changes: dict[str, Any]) -> None:
    assert not runners.draws_from_unchanged_logits(sampler(**changes), SLOTS, NONE)


def test_a_request_whose_min_tokens_are_drawn_changes_nothing_more() -> None:
    of_slot_3 = sampler(processed=[3])
    assert runners.draws_from_unchanged_logits(of_slot_3, SLOTS, np.array([True, False]))
    assert not runners.draws_from_unchanged_logits(of_slot_3, SLOTS, np.array([False, True]))
    greedy_too = sampler(processed=[3], greedy=[3])
    assert not runners.draws_from_unchanged_logits(greedy_too, SLOTS, np.array([True, False]))


@pytest.mark.parametrize(
    ("params", "logits_changed_until"),
    [
        ({}, 0),
        ({"min_tokens": 1}, 1),
        ({"min_tokens": 4}, 4),
        ({"min_tokens": 1, "temperature": 0.9}, runners._TO_THE_END),
        ({"min_tokens": 1, "top_p": 0.9}, runners._TO_THE_END),
        ({"min_tokens": 1, "top_k": 5}, runners._TO_THE_END),
        ({"min_tokens": 1, "min_p": 0.1}, runners._TO_THE_END),
        ({"min_tokens": 1, "repetition_penalty": 1.1}, runners._TO_THE_END),
        ({"min_tokens": 1, "logit_bias": {3: 1.0}}, runners._TO_THE_END),
        ({"min_tokens": 1, "bad_words": ["a"]}, runners._TO_THE_END),
    ],
)
@pytest.mark.parametrize("has_prompt_len", [True, False])
def test_for_how_many_tokens_parameters_change_logits(
    params: dict[str, Any], logits_changed_until: int, has_prompt_len: bool
) -> None:
    """Of a request in slot 2. OpenRLHF has min_tokens=1 in each; vLLM 0.31 passes no length of the prompt any more."""
    sampling = pytest.importorskip("vllm").SamplingParams(**params)
    noted = np.full(4, -1)

    def until_0_30(req_idx: int, prompt_len: int, sampling_params: Any) -> None: ...
    def since_0_31(req_idx: int, sampling_params: Any) -> None: ...

    if has_prompt_len:
        runners._noting_changed_logits(until_0_30, noted)(2, 7, sampling)
    else:
        runners._noting_changed_logits(since_0_31, noted)(2, sampling)
    assert noted.tolist() == [-1, -1, logits_changed_until, -1]


def test_a_release_that_applies_all_parameters_in_each_step_keeps_them_outside() -> None:
    of_0_26 = sampler()
    del of_0_26.needs_logits_processing
    assert not runners.draws_from_unchanged_logits(of_0_26, SLOTS, NONE)


# --- a step of vLLM's own code --------------------------------------------------------------------------------------


class Perturber:
    """Notes what a step draws from."""

    busy = True
    composition = 1
    drawn_tokens = np.zeros(ROWS, dtype=np.int64)

    def __init__(self, graphs: bool = True) -> None:
        self.graphs = graphs
        self.drawn_from: list[str] = []

    def computes_logits(self, rows: int) -> bool:
        return self.graphs and rows <= ROWS

    def temperature_factor(self, *_: Any) -> None:
        return None

    def finish(self, scaled: Any, temperature: Any, drawable: Any, greedy: Any, output_hidden: Any = None) -> Any:
        assert scaled.shape == (ROWS, VOCABULARY)
        assert greedy is None
        assert drawable is None
        self.drawn_from.append("logits" if output_hidden is None else "hidden states")
        assert scaled.is_meta == (output_hidden is not None)
        return torch.arange(ROWS)


def step_of_vllm(
    monkeypatch: pytest.MonkeyPatch,
    perturber: Perturber,
    grammar: Any = None,
    logits_changed_until: np.ndarray | None = None,
    **changes: Any,
) -> Callable[[], Any]:
    """``GPUModelRunner.sample`` and ``Sampler`` of vLLM, with the parts that need a GPU left out."""
    module = pytest.importorskip("vllm.v1.worker.gpu.model_runner")
    sampler_module = pytest.importorskip("vllm.v1.worker.gpu.sample.sampler")
    monkeypatch.setattr(
        sampler_module, "get_num_sampled_and_rejected", lambda *_: (torch.ones(ROWS), torch.zeros(ROWS))
    )
    layer, model = output_layer_with_model()
    # Without vLLM's constructor, whose states are on a GPU.
    vllm_sampler = sampler_module.Sampler.__new__(sampler_module.Sampler)
    vars(vllm_sampler).update(vars(sampler(**changes)))
    vllm_sampler.logprobs_mode = "raw_logprobs"
    vllm_sampler.return_sampling_mask = False
    vllm_sampler.trace_replay_state = None
    vllm_sampler.req_states = SimpleNamespace(prefill_len=SimpleNamespace(gpu=None))
    vllm_sampler.apply_sampling_params = lambda logits, *_, **__: logits
    states = vllm_sampler.sampling_states
    states.temperature = SimpleNamespace(gpu=torch.ones(4))
    states.min_p = SimpleNamespace(np=np.zeros(4))
    states.apply_min_p = None
    states.vocab_size = VOCABULARY
    states.top_k = SimpleNamespace(np=np.full(4, VOCABULARY))
    states.top_p = SimpleNamespace(np=np.ones(4))
    grammar_worker = SimpleNamespace(apply_grammar_bitmask=lambda logits, *_: logits.sum().item())
    runner = SimpleNamespace(
        model=model,
        batch_sharder=None,
        structured_outputs_worker=grammar_worker,
        sampler=vllm_sampler,
        rejection_sampler=None,
        speculator=None,
    )
    runner.sample = MethodType(module.GPUModelRunner.sample, runner)
    perturbation = SimpleNamespace(perturber=perturber, output_layer=layer)
    vllm_sampler.sample = runners._sample_v2(vllm_sampler, perturbation)
    logits_changed_until = np.full(4, runners._TO_THE_END) if logits_changed_until is None else logits_changed_until
    runner.sample = runners._leave_logits_to_graph(runner, perturbation, layer, logits_changed_until)
    slots = np.array([0, 1, 2])
    rows = torch.arange(ROWS)
    batch = SimpleNamespace(
        num_reqs=ROWS,
        num_draft_tokens=0,
        logits_indices=rows,
        expanded_idx_mapping=rows,
        idx_mapping=rows,
        idx_mapping_np=slots,
        cu_num_logits_np=np.arange(ROWS + 1),
        cu_num_logits=None,
        expanded_local_pos=rows,
        positions=rows,
        input_ids=rows,
        seq_lens=rows,
    )
    return lambda: runner.sample(torch.ones(ROWS, HIDDEN), batch, grammar)


def test_a_step_of_vllm_is_drawn_from_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    perturber = Perturber()
    output, num_sampled, _rejected = step_of_vllm(monkeypatch, perturber)()
    assert perturber.drawn_from == ["hidden states"]
    assert output.sampled_token_ids.tolist() == [[0], [1], [2]]
    assert num_sampled.tolist() == [1] * ROWS
    assert output.logprobs_tensors is None
    assert output.num_nans is None


def test_a_grammar_and_a_step_without_a_graph_have_their_logits_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    perturber = Perturber()
    grammar = SimpleNamespace(structured_output_request_ids=["a"], grammar_bitmask=None, num_acceptable_drafts=None)
    step_of_vllm(monkeypatch, perturber, grammar)()
    assert perturber.drawn_from == ["logits"]
    perturber = Perturber(graphs=False)
    step_of_vllm(monkeypatch, perturber)()
    assert perturber.drawn_from == ["logits"]


def test_the_parameters_of_a_batch_are_read_again_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    perturber = Perturber()
    checked: list[int] = []

    def unchanged(sampler: Any, slots: Any, is_past_changes: Any) -> bool:
        checked.append(perturber.composition)
        return perturber.composition != 2

    monkeypatch.setattr(runners, "draws_from_unchanged_logits", unchanged)
    step = step_of_vllm(monkeypatch, perturber)
    for composition in (1, 1, 2, 2, 3):
        perturber.composition = composition
        step()
    assert checked == [1, 2, 3]
    assert perturber.drawn_from == ["hidden states"] * 2 + ["logits"] * 2 + ["hidden states"]


def test_the_step_after_the_last_min_tokens_is_drawn_from_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 1 has two min_tokens; the batch stays the same."""
    perturber = Perturber()
    logits_changed_until = np.array([0, 2, 0, runners._TO_THE_END])
    step = step_of_vllm(monkeypatch, perturber, logits_changed_until=logits_changed_until, processed=[1])
    for drawn in (0, 1, 2, 3):
        perturber.drawn_tokens = np.array([drawn] * ROWS)
        step()
    assert perturber.drawn_from == ["logits"] * 2 + ["hidden states"] * 2


# --- the engine -----------------------------------------------------------------------------------------------------


def runner_of(model: nn.Module, **changes: Any) -> Any:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=changes.get("ranks", 1)), lora_config=changes.get("lora")
    )
    runner = SimpleNamespace(
        vllm_config=config,
        get_model=lambda: model,
        model_config=SimpleNamespace(get_hidden_size=lambda: HIDDEN, dtype=torch.float32),
        device=torch.device("cpu"),
    )
    if changes.get("version", "V2") == "V2":
        runner.sample = None
    return runner


def model_of(monkeypatch: pytest.MonkeyPatch, processors: int = 1, own: bool = False) -> nn.Module:
    layers = pytest.importorskip("vllm.model_executor.layers.logits_processor")

    class Processor(nn.Module):
        pass

    monkeypatch.setattr(layers, "LogitsProcessor", Processor)
    kind = type("Own", (Processor,), {}) if own else Processor
    model = nn.ModuleList([kind() for _ in range(processors)])
    model.compute_logits = lambda hidden: hidden
    return model


def test_the_output_layer_of_a_v2_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = output_layer_of(runner_of(model_of(monkeypatch)), VOCABULARY)
    assert layer is not None
    assert layer.examples(2).shape == (2, HIDDEN)


@pytest.mark.parametrize("changes", [{"version": "V1"}, {"ranks": 2}, {"lora": object()}])
def test_an_engine_whose_logits_stay_outside(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    assert output_layer_of(runner_of(model_of(monkeypatch), **changes), VOCABULARY) is None


@pytest.mark.parametrize("changes", [{"processors": 0}, {"processors": 2}, {"own": True}])
def test_a_model_whose_logits_stay_outside(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    assert output_layer_of(runner_of(model_of(monkeypatch, **changes)), VOCABULARY) is None
