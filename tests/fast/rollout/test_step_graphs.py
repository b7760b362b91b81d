# SPDX-License-Identifier: Apache-2.0
"""A step as one graph, on a pretended GPU: the bits of a step whose parts run one by one; and planted faults.

The stand-in for a CUDA graph keeps addresses and spoils the memory of its region: `cuda_without_gpu/recorded.py`.
"""

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import decode_step
from benchmarks.command_line import in_tree
from benchmarks.cuda_without_gpu import recorded
from benchmarks.cuda_without_gpu.recorded import RecordedGraph
from benchmarks.cuda_without_gpu.simulated import Disagreement, simulate, together
from benchmarks.cuda_without_gpu.simulated_engine import Head, Plan
from ngrpo.rollout import step_graphs
from ngrpo.rollout.async_scheduling import HostBuffers
from ngrpo.rollout.perturber import RolloutPerturber
from ngrpo.rollout.step_graphs import StepGraphs, bucket_sizes, rows_of_buffers
from ngrpo.rollout.step_kernels import StepKernels
from ngrpo.rollout.step_rows import Logits
from perturbations import create

pytestmark = pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs PyTorch's build for CPUs")

NAMES = sorted(set(in_tree()) - {"none"})
PLANS = {
    "steady": Plan(seed=5, shuffled=False),
    "filtered": Plan(seed=2, lag=3, preempted=0.1, chunk=5, batch=5, sampling="filtered"),
    "masked": Plan(seed=3, lag=6, preempted=0.2, chunk=3, batch=6, masked=True, sampling="filtered"),
    "greedy": Plan(seed=4, lag=2, preempted=0.05, chunk=100, batch=3, sampling="greedy"),
    "bfloat16": Plan(seed=6, lag=1, preempted=0.1, chunk=6, batch=3, dtype=torch.bfloat16),
}
# The graph computes the logits.
OUTPUT_PLANS = {
    "output layer": Plan(seed=7, lag=2, preempted=0.1, chunk=5, batch=5, output_layer=True),
    "output layer in bfloat16": Plan(seed=8, lag=1, batch=3, dtype=torch.bfloat16, output_layer=True),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "rate 0.1": {"rate": 0.1},
    "rate 1": {"rate": 1.0},
    "until": {"rate": 0.7, "until": "b"},
    "swi": {"rate": 0.7, "gate": "swi"},
}


def made(name: str, **options: Any) -> Any:
    more = {"realization": "sampled"} if name == "neighbor" else {}
    return create(name, **{**more, **options})


def same_bits(monkeypatch: pytest.MonkeyPatch, name: str, plan: Plan, **options: Any) -> None:
    replays = RecordedGraph.replays
    tokens, records, fed = together(made(name, **options), plan, count=5)
    assert RecordedGraph.replays > replays, "no graph was replayed"
    with monkeypatch.context() as patched:
        patched.setattr(step_graphs, "available", lambda device: False)
        replays = RecordedGraph.replays
        parts_tokens, parts_records, parts_fed = together(made(name, **options), plan, count=5)
        assert RecordedGraph.replays == replays
    assert tokens == parts_tokens
    assert records == parts_records
    assert fed.keys() == parts_fed.keys()
    for at, vector in fed.items():
        assert torch.equal(vector, parts_fed[at]), at


def cases() -> Iterator[Any]:
    """Each perturbation once, with plans and options in turn; those with ``more`` are not in `make test`."""
    for number, name in enumerate(NAMES):
        plan = [*PLANS][number % len(PLANS)]
        options = [*OPTIONS][number % len(OPTIONS)]
        yield pytest.param(name, plan, options, marks=[] if name in ("gumbel", "neighbor") else pytest.mark.more)


@pytest.mark.parametrize(("name", "plan", "options"), cases())
def test_a_graph_has_the_bits_of_its_parts(monkeypatch: pytest.MonkeyPatch, name: str, plan: str, options: str) -> None:
    same_bits(monkeypatch, name, PLANS[plan], **OPTIONS[options])


@pytest.fixture
def computed_in_graphs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step as a graph, whether the graph computed its logits."""
    steps: list[bool] = []

    def run(self: StepGraphs, columns: Any, batch: int, logits: Any, output_hidden: Any) -> Any:
        steps.append(output_hidden is not None)
        return RUN_KIND(self, columns, batch, logits, output_hidden)

    monkeypatch.setattr(StepGraphs, "_run", run)
    return steps


@pytest.mark.parametrize("plan", OUTPUT_PLANS)
@pytest.mark.parametrize("name", ["gumbel", pytest.param("neighbor", marks=pytest.mark.more)])
def test_a_graph_that_computes_the_logits_has_the_bits_of_its_parts(
    monkeypatch: pytest.MonkeyPatch, computed_in_graphs: list[bool], name: str, plan: str
) -> None:
    same_bits(monkeypatch, name, OUTPUT_PLANS[plan], rate=0.7)
    assert computed_in_graphs
    assert all(computed_in_graphs)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param("tarpo", OUTPUT_PLANS["output layer"], id="the perturbation reads the hidden states"),
        pytest.param("gumbel", replace(OUTPUT_PLANS["output layer"], masked=True), id="masks are recorded"),
    ],
)
def test_what_reads_logits_or_hidden_states_keeps_the_logits_outside(
    monkeypatch: pytest.MonkeyPatch, computed_in_graphs: list[bool], name: str, plan: Plan
) -> None:
    same_bits(monkeypatch, name, plan, rate=0.7)
    assert computed_in_graphs
    assert not any(computed_in_graphs)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("plan", OUTPUT_PLANS)
@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_with_its_logits_has_the_bits_of_its_parts(
    monkeypatch: pytest.MonkeyPatch, name: str, plan: str, options: str
) -> None:
    same_bits(monkeypatch, name, OUTPUT_PLANS[plan], **OPTIONS[options])


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_has_the_bits_of_its_parts(
    monkeypatch: pytest.MonkeyPatch, name: str, plan: str, options: str
) -> None:
    same_bits(monkeypatch, name, PLANS[plan], **OPTIONS[options])


@pytest.mark.more
def test_a_further_gates_plan_and_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    same_bits(monkeypatch, "gumbel", PLANS["filtered"], rate=1.0, gate="bursts")
    same_bits(monkeypatch, "gumbel", PLANS["steady"], rate=0.5, every=2, burn_in=2)
    same_bits(monkeypatch, "gumbel", PLANS["masked"], rate=0.7, entropy_min=1.0, protect="digits")


def test_buckets() -> None:
    assert bucket_sizes(1) == (2,)
    assert bucket_sizes(64) == (2, 4, 8, 16, 32, 64)
    assert bucket_sizes(65)[-1] == 96
    assert bucket_sizes(1024)[-1] == 512
    assert rows_of_buffers(50) == 64
    assert rows_of_buffers(1024) == 1024


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[decode_step.Decoding]:
    """Sixteen requests after their first step as one graph, whose replay does nothing."""
    monkeypatch.setattr(step_graphs, "available", lambda device: True)
    monkeypatch.setattr(step_graphs, "CudaGraph", decode_step._NoGraph)
    with torch.inference_mode():
        started = decode_step.Decoding(made("gumbel", rate=0.7), 16)
        started.step()
        yield started


def test_a_buffer_of_another_stride_ends_the_graphs_that_read_the_old_one(decoding: decode_step.Decoding) -> None:
    with torch.inference_mode():
        graphs = decoding.perturber._graphs
        assert len(graphs._graphs) == 1
        graphs._wide_buffer("scaled", torch.zeros(1, 1024))  # of one row the stride says nothing
        graphs._wide_buffer("drawable", torch.zeros(4, 1024))
        assert len(graphs._graphs) == 1
        graphs._wide_buffer("scaled", torch.zeros(4, 1088)[:, :1024])
        assert not graphs._graphs
        decoding.step()
        assert len(graphs._graphs) == 1


def test_every_kind_of_step_is_captured_at_the_start(decoding: decode_step.Decoding) -> None:
    """A kind that is missing would be compiled, and captured in every size, in the middle of a rollout."""
    with torch.inference_mode():
        graphs = decoding.perturber._graphs
        graphs.forget()
        graphs.rehearse(torch.zeros(16, 1024, dtype=torch.bfloat16))
        kinds = {(kind.dtype, kind.filtered) for kind in graphs._graphs}
        # Requests without parameters; with a temperature or penalties; with top-p as well.
        assert kinds == {(torch.bfloat16, False), (torch.float32, False), (torch.float32, True)}
        assert len(graphs._graphs) == 3 * len(graphs.sizes)


def test_filtered_logits_of_a_padded_vocabulary_have_the_strides_of_the_rehearsal(
    decoding: decode_step.Decoding,
) -> None:
    """With other strides all graphs would be compiled, and captured, again in the middle of a rollout."""
    with torch.inference_mode():
        graphs = decoding.perturber._graphs
        graphs.forget()
        padded = torch.zeros(16, 1088)[:, :1024]
        graphs.rehearse(padded)
        captured = len(graphs._graphs)
        logits = Logits(padded, torch.ones(16), drawable=padded.clone(), greedy=None, hidden=None)
        static = graphs._placed(logits, batch=16, size=16)
        assert len(graphs._graphs) == captured
        assert (static.scaled.stride(0), static.drawable.stride(0)) == (1088, 1024)


def test_the_memory_of_an_old_pool_is_freed_before_a_new_one_is_made(
    monkeypatch: pytest.MonkeyPatch, decoding: decode_step.Decoding
) -> None:
    alive_when_freed: list[int] = []
    graphs = decoding.perturber._graphs
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive_when_freed.append(len(graphs._graphs)))
    with torch.inference_mode():
        decoding.step()
        assert alive_when_freed == []
        for _ in range(3):  # as OpenRLHF's weight syncs, which load one parameter at a time
            graphs.forget()
        decoding.step()
        decoding.step()
    assert alive_when_freed == [0]


def test_a_perturber_that_is_replaced_keeps_no_graph(decoding: decode_step.Decoding) -> None:
    perturber = decoding.perturber
    graphs = weakref.ref(perturber._graphs)
    gc.disable()
    try:
        perturber.close()
        assert graphs() is None, "the graphs and their buffers wait for the garbage collector"
    finally:
        gc.enable()
    with torch.inference_mode():
        decoding.step()


def test_a_step_has_its_own_greedy_tokens_and_temperatures(decoding: decode_step.Decoding) -> None:
    with torch.inference_mode():
        graphs = decoding.perturber._graphs
        temperature = torch.tensor([0.5, 2.0])
        greedy = torch.tensor([7, -1])
        logits = Logits(torch.zeros(2, 1024), temperature, drawable=None, greedy=greedy, hidden=None)
        placed = graphs._placed(logits, batch=2, size=4)
        assert placed.greedy.tolist() == [7, -1, -1, -1]
        assert placed.temperature[:2].tolist() == [0.5, 2.0]
        later = logits._replace(temperature=torch.tensor([1.5, 0.25]), greedy=None)
        placed = graphs._placed(later, batch=2, size=4)
        assert placed.greedy.tolist() == [-1, -1, -1, -1]
        assert placed.temperature[:2].tolist() == [1.5, 0.25]


def test_the_tokens_of_a_step_are_out_of_reach_of_the_next_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM may copy them on another stream while the next step writes to the graph's addresses."""
    monkeypatch.setattr(step_graphs, "available", lambda device: True)
    monkeypatch.setattr(step_graphs, "CudaGraph", decode_step._NoGraph)
    drawn: list[torch.Tensor] = []

    def run(self: StepGraphs, *args: Any) -> Any:
        result = RUN(self, *args)
        drawn.append(result[0])
        return result

    monkeypatch.setattr(StepGraphs, "run", run)
    with torch.inference_mode():
        decoding = decode_step.Decoding(made("gumbel", rate=0.7), 16)
        for _ in range(2):
            decoding.step()
    written = decoding.perturber._graphs._tokens
    memories = [tokens.untyped_storage().data_ptr() for tokens in (written, *drawn)]
    assert len(drawn) == 2
    assert len(set(memories)) == 3


# --- planted faults -----------------------------------------------------------------------------------------------

FAULT_PLAN = Plan(seed=2, lag=3, chunk=5, batch=5, sampling="filtered")
WIDE_ROWS = StepGraphs._wide_rows
UPLOAD = HostBuffers.upload
STEP = StepKernels.step_in_graph
RUN = StepGraphs.run
RUN_KIND = StepGraphs._run
COMPUTE = Head.compute_logits
OPENED = RolloutPerturber.opened


def test_an_input_without_a_fixed_address_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def anywhere(self: StepGraphs, name: str, rows: Any, size: int) -> Any:
        return WIDE_ROWS(self, name, rows, size).clone()

    monkeypatch.setattr(StepGraphs, "_wide_rows", anywhere)
    with pytest.raises(Disagreement):
        simulate(made("gumbel", rate=0.7), FAULT_PLAN, count=5)


def test_an_upload_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = []

    def upload(self: HostBuffers, array: Any, target: Any) -> None:
        uploads.append(array)
        if len(uploads) % 3:
            UPLOAD(self, array, target)

    monkeypatch.setattr(HostBuffers, "upload", upload)
    with pytest.raises(Disagreement):
        simulate(made("gumbel", rate=0.7), FAULT_PLAN, count=5)


def test_a_buffer_that_is_used_again_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: StepGraphs, *args: Any) -> Any:
        result = RUN(self, *args)
        result[-1].give_back()
        return result

    monkeypatch.setattr(StepGraphs, "run", run)
    with pytest.raises((Disagreement, ValueError, IndexError)):
        simulate(made("gumbel", rate=0.7), FAULT_PLAN, count=5)


def test_a_result_that_is_left_in_the_pool_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    left = []

    def step(self: StepKernels, *args: Any) -> Any:
        edited, words = STEP(self, *args)
        left.append(edited.tokens)
        return edited, words

    def run(self: StepGraphs, *args: Any) -> Any:
        tokens, record, buffer = RUN(self, *args)
        return left[-1][: len(tokens)].clone(), record, buffer

    monkeypatch.setattr(StepKernels, "step_in_graph", step)
    monkeypatch.setattr(StepGraphs, "run", run)
    with pytest.raises((Disagreement, ValueError, IndexError)):
        simulate(made("gumbel", rate=0.7), FAULT_PLAN, count=5)


def waits(edited: Any) -> None:
    edited.tokens.max().item()


def reads_the_host(edited: Any) -> None:
    edited.log_probs.add_(torch.zeros(len(edited.log_probs)))


@pytest.mark.parametrize("fault", [waits, reads_the_host])
def test_a_step_that_cannot_be_captured_runs_in_parts_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Any
) -> None:
    def step(self: StepKernels, *args: Any) -> Any:
        edited, words = STEP(self, *args)
        if recorded.capturing():
            fault(edited)
        return edited, words

    monkeypatch.setattr(StepKernels, "step_in_graph", step)
    caplog.set_level(logging.WARNING, logger="ngrpo.rollout")
    simulate(made("gumbel", rate=0.7), FAULT_PLAN, count=5)
    said = [record.message for record in caplog.records if "cannot be captured" in record.message]
    assert len(said) == 1
    assert "perturbation gumbel" in said[0]
    assert "not permitted" in said[0]


class InvalidGraph:
    """As `torch.cuda.CUDAGraph` after an operation that a capture does not permit: its end fails as well."""

    def capture_begin(self, **settings: Any) -> None: ...

    def capture_end(self) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


def test_a_failed_capture_names_the_operation_and_not_its_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(step_graphs, "_capture_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", InvalidGraph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda side: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    ended: list[tuple[str, object]] = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda device, pool, name=name: ended.append((name, pool)), raising=False)
    monkeypatch.setattr(step_graphs, "_failed_captures", [])

    def region() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        step_graphs.CudaGraph((0, 1)).capture(region)
    assert ended == [("_cuda_endAllocateToPool", (0, 1)), ("_cuda_releasePool", (0, 1))]
    assert len(step_graphs._failed_captures) == 1
    with pytest.raises(RuntimeError, match="previous error"):  # nothing else to say
        step_graphs.CudaGraph((0, 1)).capture(lambda: None)


def test_logits_that_cannot_be_captured_are_computed_outside_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, computed_in_graphs: list[bool]
) -> None:
    def compute(self: Head, hidden: Any) -> Any:
        if recorded.capturing():
            hidden.max().item()
        return COMPUTE(self, hidden)

    monkeypatch.setattr(Head, "compute_logits", compute)
    caplog.set_level(logging.WARNING, logger="ngrpo.rollout")
    simulate(made("gumbel", rate=0.7), OUTPUT_PLANS["output layer"], count=5)
    messages = [record.message for record in caplog.records]
    assert len(messages) == 1
    assert "computed outside" in messages[0]
    assert "not permitted" in messages[0]
    assert computed_in_graphs.count(True) == 1
    assert computed_in_graphs[0]
    assert len(computed_in_graphs) > 2, "the other steps are graphs still"


def test_a_step_whose_logits_are_left_to_a_graph_that_fails_runs_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: StepKernels, *args: Any) -> Any:
        edited, words = STEP(self, *args)
        if recorded.capturing():
            waits(edited)
        return edited, words

    monkeypatch.setattr(StepKernels, "step_in_graph", step)
    simulate(made("gumbel", rate=0.7), OUTPUT_PLANS["output layer"], count=5)


def test_an_output_layer_that_has_moved_is_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its old memory has other values, as after vLLM has used it again."""

    def opened(self: RolloutPerturber, name: str, prompt: Any = ()) -> None:
        OPENED(self, name, prompt)
        output = self._output
        head = output.compute.__self__
        old_weight = head.weight
        head.weight = old_weight.clone()
        output.tensors[:] = [head.weight]
        old_weight.zero_()

    monkeypatch.setattr(RolloutPerturber, "opened", opened)
    perturbation = made("gumbel", rate=0.7)
    simulate(perturbation, OUTPUT_PLANS["output layer"], count=8)
    monkeypatch.setattr(StepGraphs, "_check_addresses", lambda self: None)
    with pytest.raises((Disagreement, ValueError, IndexError)):
        simulate(perturbation, OUTPUT_PLANS["output layer"], count=8)


def moved(self: RolloutPerturber, name: str, prompt: Any = ()) -> None:
    """The gate's state is at other addresses from now on, as after its growth."""
    OPENED(self, name, prompt)
    gate = self._gate
    gate._states = gate._states.clone()
    gate._ended = gate._ended.clone()
    gate._further_states = gate._further_states.clone()


def test_a_state_that_has_moved_is_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RolloutPerturber, "opened", moved)
    perturbation = made("soft", rate=1.0, until="b", gate="swi")
    # More requests than slots: a request that gets the slot of another must not find that one's state.
    simulate(perturbation, FAULT_PLAN, count=24)
    monkeypatch.setattr(StepGraphs, "_check_addresses", lambda self: None)
    with pytest.raises((Disagreement, ValueError, IndexError)):
        simulate(perturbation, FAULT_PLAN, count=24)
