# SPDX-License-Identifier: Apache-2.0
"""The hot path: what happens to each step of a vLLM model runner when a perturbation is on.

1. ``begin``, before the forward: each row of the forward is told where its input comes from. The edits drawn after the
   last step are in the embedding's override already; positions that are computed again, after a preemption or in a
   further turn, get theirs from the store.
2. ``finish``, instead of vLLM's sampler: the next tokens are drawn, and the edits of the rows that the gate selects. On
   a GPU this is one CUDA graph (`step_graphs.py`); elsewhere, and where no graph serves, the parts of `step_kernels.py`
   run one by one. Nothing waits for the device.
3. The draws are copied to the host while further steps run, then written into the store (`async_scheduling.py`).

`requests.py` opens and closes slots. A slot has a trajectory's state in the store, the gate and the masks, also during
preemption, until its last step is in the store.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ngrpo.methods.sampling_schedules.base import SamplingSchedule
from ngrpo.rollout import step_graphs
from ngrpo.rollout.async_scheduling import DrawnBatch, HostBuffer, PendingStep, PendingSteps
from ngrpo.rollout.batch import NO_POSITIONS, Batch, Rows, no_rows
from ngrpo.rollout.chunks import grown
from ngrpo.rollout.input_override import PLAIN, InputOverride
from ngrpo.rollout.output_layer import OutputLayer
from ngrpo.rollout.routed_experts import RoutedExperts
from ngrpo.rollout.sampling_support import SamplingMaskStore, SamplingSupport
from ngrpo.rollout.scheduled_temperatures import ScheduledTemperatures
from ngrpo.rollout.step_graphs import CaptureFailed, StepGraphs
from ngrpo.rollout.step_kernels import StepKernels
from ngrpo.rollout.step_records import SeparateRecord
from ngrpo.rollout.step_rows import GatedRows, Logits, upload_matrices
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations import InputEdit, Perturbation, Positions, streams
from perturbations.edit import realise
from perturbations.embeddings import ModelEmbeddings
from perturbations.errors import require
from perturbations.gates.default import BoundGate

logger = logging.getLogger("ngrpo.rollout")

T = TypeVar("T")

# Stored edits are mixed in chunks of at most this many candidates, or as many as the largest warm-up had.
REPLAY_CHUNK = 1024


class RolloutPerturber:
    """Perturbs the rollouts of one worker. Tensor-parallel ranks do the same work on the same draws."""

    def __init__(
        self,
        perturbation: Perturbation,
        store: TrajectoryStore,
        gate: BoundGate,
        embeddings: ModelEmbeddings,
        override: InputOverride,
        device: torch.device,
        module: nn.Module | None = None,
        masks: SamplingMaskStore | None = None,
        full_log_probs: bool = False,
        schedule: SamplingSchedule | None = None,
        routed: RoutedExperts | None = None,
        graphs: bool = True,
        output: OutputLayer | None = None,
    ) -> None:
        """
        Args:
            perturbation: what proposes the edits.
            store: of the live trajectories.
            gate: selects and judges the proposals; it has a row for each slot of the store.
            embeddings: of the model, for perturbations.
            override: of the model's input embedding.
            device: of the model.
            module: the perturbation's learned module, if it has one.
            masks: the store of the tokens that sampling left; None where these are not recorded.
            full_log_probs: whether recorded log π is over the whole vocabulary also where there are masks.
            schedule: changes temperatures; None for none.
            routed: records the experts of each token; None where these are not recorded.
            graphs: whether a step may be captured as a CUDA graph.
            output: the model's output layer, which a graph may run; None where the logits stay outside.
        """
        self._perturbation = perturbation
        self._store = store
        self._gate = gate
        self._embeddings = embeddings
        self._override = override
        self.device = device
        self._module = module
        self.masks = masks
        self._temperatures = None if schedule is None else ScheduledTemperatures(schedule, store, self._upload)
        self.routed = routed
        self._kernels = StepKernels(
            perturbation,
            gate,
            embeddings,
            lookup=override.lookup,
            device=device,
            module=module,
            masked=masks is not None and not full_log_probs,
        )
        # A schedule and the store of masks read the logits outside of graphs, and some perturbations the hidden states.
        stays_outside = perturbation.reads_hidden or masks is not None or schedule is not None
        self._output = None if stays_outside else output
        self._graphs: StepGraphs | None = None
        if graphs and perturbation.active and step_graphs.available(device):
            gate.grow(store.slots + 1)  # the scratch row
            self._graphs = StepGraphs(self._kernels, gate, override, device, self._watched, self._output)
        self.pending = PendingSteps(store, masks, routed, lambda: self._event())
        # Candidates of stored edits that are mixed at once.
        self._candidates_at_once = REPLAY_CHUNK

        # The batch, and what stays the same while its rows do.
        self._rows = no_rows()
        self.composition = 0  # counts the changes of the batch's rows
        self._row_of_slot = np.full(store.slots, -1, dtype=np.int64)  # -1 for slots that are not in the batch

        # The step in flight: set before the forward, read after the logits.
        self._batch: Batch | None = None
        self._hidden: Tensor | None = None

        # The last step, whose edits are in the override: slots and positions of its rows' tokens, (B,) each.
        self._drawn_slots = NO_POSITIONS
        self._drawn_positions = NO_POSITIONS
        self._in_order = False  # whether row i of the last forward was fed by row i of the step before
        self._last_position = np.full(store.slots, -1, dtype=np.int64)  # by slot; -1 where it drew none that is stored

    def _watched(self) -> list[Tensor]:
        """What a graph reads, beside the buffers that it makes itself."""
        tensors = [*self._gate.tensors, *self._override.tensors, *self._embeddings.tensors()]
        if self._module is not None:
            tensors += self._module.parameters()
        if self._output is not None:
            tensors += self._output.tensors
        return tensors

    def weights_changed(self) -> None:
        """The model has new weights, so that tables are built anew and a graph must read the new ones."""
        if self._graphs is not None:
            self._graphs.forget()

    def close(self) -> None:
        """Frees the graphs and their buffers; another perturber takes this one's place."""
        if self._graphs is not None:
            # Not left to the garbage collector, which may come late and in the middle of a capture.
            self._graphs.forget()
            self._graphs = None

    # --- before the forward -------------------------------------------------------------------------------------

    def begin(self, names: Sequence[str], starts: np.ndarray, counts: np.ndarray, discard: np.ndarray) -> None:
        """Prepares the override for a forward of B requests.

        Args:
            names: of the requests, in the order of the batch.
            starts: the first position that the forward computes of each request, (B,) int64.
            counts: how many positions it computes of each, (B,) int64.
            discard: whether the forward leaves the prompt incomplete, so that vLLM throws the drawn token away, (B,)
                bool.
        """
        same_rows = self._locate_rows(names)
        slots = self._rows.slots
        ends = starts + counts
        # A batch that keeps decoding is fed from the same rows of the override as in the last step.
        keeps_decoding = same_rows and self._in_order and np.array_equal(ends - 1, self._drawn_positions)
        if not keeps_decoding or (counts != 1).any():
            self._lay_out(slots, starts, counts)
        self._batch = Batch(self._rows, ends, ~discard)
        if self.routed is not None:
            self.routed.begin(slots, starts, counts, ~discard)

    def _locate_rows(self, names: Sequence[str]) -> bool:
        """Looks up the trajectories of the batch; whether they are those of the last step, in the same rows."""
        if names == self._rows.names:
            return True
        store = self._store
        self._row_of_slot[self._rows.slots] = -1
        slots = np.array([store.live[name] for name in names], dtype=np.int64)
        self._rows = Rows(
            names=list(names),
            slots=slots,
            seeds=store.seeds[slots],
            first=store.prompt_lengths[slots],
            perturbed=store.perturbed[slots],
        )
        self.composition += 1
        self._row_of_slot[slots] = np.arange(len(names))
        if self._temperatures is not None:
            self._temperatures.locate(slots)
        return False

    def _lay_out(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Tells the override where the input of each row of the forward comes from."""
        ends = starts + counts
        last_rows = np.cumsum(counts) - 1  # the forward's row of each request's last position, (B,)
        sources = np.full(int(counts.sum()), PLAIN, dtype=np.int32)
        # An edit of the last step is fed where its position is the last one that the forward computes of its request.
        batch_rows = self._row_of_slot[self._drawn_slots]  # of the last step's rows; -1 where a request is not here
        # -1 reads the last row's end; the first condition masks it.
        is_next = (batch_rows >= 0) & (ends[batch_rows] - 1 == self._drawn_positions)
        drawn_rows = is_next.nonzero()[0]
        overridden_rows = last_rows[batch_rows[drawn_rows]]
        sources[overridden_rows] = drawn_rows
        self._in_order = len(sources) == len(slots) and np.array_equal(sources, np.arange(len(slots)))
        # Decoding computes just the position that the last step drew, whose edit is placed by now. Edits of all others
        # are in the store; with `ahead`, of the start-up check, that of this position too.
        only_decodes = (counts == 1) & (starts == self._last_position[slots])
        stored = (~only_decodes | self._store.ahead[slots]) & self._store.has_edits[slots]
        for row in stored.nonzero()[0]:
            edited_rows = self._place_stored(
                slot=int(slots[row]),
                start=int(starts[row]),
                count=int(counts[row]),
                first_row=int(last_rows[row] - counts[row] + 1),
            )
            sources[edited_rows] = self._override.sources_of_stored(edited_rows)
            self._in_order = False
        self._override.lay_out(sources, self._upload)

    def _place_stored(self, slot: int, start: int, count: int, first_row: int) -> np.ndarray:
        """Places the stored edits of positions that are computed again, or that a record of earlier turns covers.

        ``first_row``: the row of the forward that position ``start`` is in. Returns the rows that are edited, (N,)
        int64.
        """
        self.pending.drain_slot(slot)
        edits = self._store.edits(slot, start, start + count)
        if not edits:
            return NO_POSITIONS
        positions = edits["positions"].astype(np.int64)
        rows = first_row + positions - start
        seeds = np.full_like(positions, self._store.seeds[slot])
        noise_keys = streams.keys(seeds, positions, streams.Stream.NOISE)
        # The start-up check (`ahead`) feeds rows of the matrix, which must not pass the perturbation's module.
        module = None if self._store.ahead[slot] else self._module
        # In chunks: a prompt has many times the rows of a step, and vLLM measured memory with a step's rows. The noise
        # of a row takes as much memory as four candidates.
        size = max(self._candidates_at_once // max(edits["ids"].shape[1], 4), 1)
        for first_of_chunk in range(0, len(rows), size):
            chunk = slice(first_of_chunk, first_of_chunk + size)
            optional = {name: self._upload(edits[name][chunk]) for name in ("sigma", "vectors") if name in edits}
            edit = InputEdit(
                ids=self._upload(edits["ids"][chunk].astype(np.int64)),
                weights=self._upload(edits["weights"][chunk]),
                **optional,
            )
            vectors = realise(edit, self._override.lookup, self._upload(noise_keys[chunk]), module)
            self._override.place_stored(self._upload(rows[chunk]), vectors)
        return rows

    # --- after the logits ---------------------------------------------------------------------------------------

    def keep_hidden(self, hidden: Tensor) -> None:
        """Keeps the last hidden states, (B, D), of which the model computes the logits of the next :meth:`finish`."""
        self._hidden = hidden

    @property
    def busy(self) -> bool:
        """Whether a step of real requests is in flight (a warm-up run is not)."""
        return self._batch is not None

    @property
    def drawn_tokens(self) -> np.ndarray:
        """How many tokens each request has drawn before the step in flight, (B,) int64; below 0 within its prompt."""
        batch = require(self._batch, "the batch of begin()")
        return batch.next_positions - batch.rows.first

    def computes_logits(self, rows: int) -> bool:
        """Whether the graph of a step of so many rows may compute the logits: :meth:`finish` takes hidden states."""
        return self.busy and self._graphs is not None and self._graphs.computes_logits(rows)

    def rehearse(self, logits: Tensor, edits: bool = True) -> None:
        """Does a step's work on any logits (B, V), to compile its parts, and for vLLM to measure the step's memory."""
        if self._graphs is not None:
            self._try_graphs(lambda graphs: graphs.rehearse(logits))
        if self._graphs is None or self._graphs.bucket(len(logits)) is None:
            self._kernels.rehearse(logits, edits)
        self._candidates_at_once = max(self._candidates_at_once, self._kernels.candidates * len(logits))
        # Equal rows, as in `StepKernels.rehearse`.
        scaled = logits[:1].float().repeat(len(logits), 1)
        if self.masks is not None:
            SamplingSupport(scaled, self._download).rehearse()
        if self._temperatures is not None:
            self._temperatures.rehearse(scaled)

    def temperature_factor(self, scaled: Tensor, temperature: Tensor, greedy: Tensor | None) -> Tensor | None:
        """The factor of each temperature (B,), 1 where no schedule applies; None for no schedule."""
        if self._temperatures is None:
            return None
        return self._temperatures.factor(require(self._batch, "the batch of begin()"), scaled, temperature, greedy)

    def finish(
        self,
        scaled: Tensor,
        temperature: Tensor,
        drawable: Tensor | None,
        greedy: Tensor | None,
        output_hidden: Tensor | None = None,
    ) -> Tensor:
        """Draws the next tokens, (B,) int64, and the edits of the gated rows.

        Args:
            scaled: z̃, (B, V) float32; the model's own logits in its dtype where no request changes or filters any. A
                placeholder without values where the graph computes the logits.
            temperature: (B,) float32, 1 for greedy rows.
            drawable: the logits after top-k, top-p and min-p, (B, V) float32; None where no request filters.
            greedy: the argmax token of a greedy row and -1 elsewhere, (B,) int64; None where no row is greedy.
            output_hidden: the last hidden states, (B, D), where the graph computes the logits; else None.
        """
        batch, hidden = self._take_step(scaled)
        logits = Logits(
            scaled=scaled,
            temperature=temperature,
            drawable=drawable,
            greedy=greedy,
            hidden=hidden,
        )
        # The store has no place for a token beyond the longest trajectory's last position.
        stored_tokens = batch.keeps_token & (batch.next_positions < self._store.max_model_len)
        drawn = self._draw_by_graph(batch, stored_tokens, logits, output_hidden)
        if drawn is None:
            if output_hidden is not None:
                output = require(self._output, "the output layer")
                logits = logits._replace(scaled=output.compute(output_hidden))
            drawn = self._draw_in_parts(batch, stored_tokens, logits)
        support = None
        if self.masks is not None:
            support = SamplingSupport(scaled if drawable is None else drawable, self._download)
        routed = None if self.routed is None else self.routed.take(self._download)
        self._remember(batch, stored_tokens, drawn.may_edit)
        self.pending.add(
            PendingStep(
                ready=self._event(drawn.buffer),
                slots=batch.slots,
                positions=batch.next_positions,
                kept_rows=None if stored_tokens.all() else stored_tokens.nonzero()[0],
                record=drawn.record,
                support=support,
                routed=routed,
                buffer=drawn.buffer,
            )
        )
        return drawn.tokens

    def _take_step(self, scaled: Tensor) -> tuple[Batch, Tensor | None]:
        """The step that :meth:`begin` announced, and its last hidden states."""
        batch = require(self._batch, "the batch of begin()")
        hidden = self._hidden
        self._batch = None
        self._hidden = None
        if hidden is not None and len(hidden) != len(scaled):
            raise RuntimeError(f"{len(scaled)} rows are sampled, of logits of {len(hidden)} last hidden states.")
        return batch, hidden

    def _draw_by_graph(
        self, batch: Batch, stored_tokens: np.ndarray, logits: Logits, output_hidden: Tensor | None
    ) -> DrawnBatch | None:
        """A step as one graph; None where no graph serves it."""
        size = None if self._graphs is None else self._graphs.bucket(len(batch.slots))
        if size is None:
            return None
        rows = batch.rows
        eligible = stored_tokens & rows.perturbed
        if self._gate.plans:  # the host must ask a further gate for its plan; rate and schedule are the device's
            positions = Positions(seeds=rows.seeds, first=rows.first, positions=batch.next_positions)
            eligible = self._gate.planned(positions, eligible)
        columns = rows.columns_of(size, scratch=self._store.slots)
        count = len(batch.slots)
        columns.positions[:count] = batch.next_positions
        columns.keeps_token[:count] = batch.keeps_token
        columns.eligible[:count] = eligible
        matrix = require(rows.matrix, "the columns")
        result = self._try_graphs(lambda graphs: graphs.run(matrix, count, logits, output_hidden))
        if result is None:
            return None
        tokens, record, buffer = result
        return DrawnBatch(tokens, record, buffer, may_edit=batch.slots[eligible])

    def _try_graphs(self, act: Callable[[StepGraphs], T]) -> T | None:
        """The result of ``act``; None, and no graphs from now on, where a step cannot be captured."""
        try:
            return act(require(self._graphs, "the graphs"))
        except CaptureFailed as error:
            logger.warning(
                "perturbation %s: a step is no CUDA graph, and takes the host longer: it cannot be captured (%s).",
                self._perturbation.name,
                error,
            )
            self._graphs = None
            return None

    def _draw_in_parts(self, batch: Batch, stored_tokens: np.ndarray, logits: Logits) -> DrawnBatch:
        """A step whose parts run one by one; the host selects the rows that may be edited."""
        rows = batch.rows
        positions = Positions(seeds=rows.seeds, first=rows.first, positions=batch.next_positions)
        gated = self._gate.selected(positions, stored_tokens & rows.perturbed)
        # In the order of `StepRows` and `GatedRows`.
        columns = [
            batch.slots,
            rows.first,
            batch.next_positions,
            batch.keeps_token,
            rows.seeds,
            positions.keys(streams.Stream.TOKEN),
        ]
        gated_columns = [gated, *streams.of_streams(positions.mixed[gated], GatedRows.STREAMS)]
        step_rows, gated_rows = upload_matrices(self._upload, columns, gated_columns)
        edited = self._kernels.step(step_rows, gated_rows, logits)
        if edited.vectors is None:
            self._override.clear_drawn()
        else:
            self._override.put_drawn(GatedRows.view(gated_rows).rows, edited.vectors, edited.recorded["fed"])
        record = SeparateRecord(
            token_log_probs=self._download(edited.log_probs),
            gated_rows=gated,
            fields={name: self._download(field) for name, field in edited.recorded.items()},
        )
        return DrawnBatch(edited.tokens, record, buffer=None, may_edit=batch.slots[gated])

    def _remember(self, batch: Batch, stored_tokens: np.ndarray, may_edit: np.ndarray) -> None:
        """What the next step needs to know of this one."""
        self._drawn_slots = batch.slots
        self._drawn_positions = batch.next_positions
        if not stored_tokens.all():
            self._in_order = False  # a row whose token is thrown away goes on with its prompt
        # A slot that is not in this step has -1: if it comes back, its edits come from the store.
        self._last_position.fill(-1)
        self._last_position[batch.slots[stored_tokens]] = batch.next_positions[stored_tokens]
        self._store.has_edits[may_edit] = True

    def _event(self, buffer: HostBuffer | None = None) -> torch.cuda.Event | None:
        """Records an event after all earlier copies, the buffer's own if given; None without CUDA."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event() if buffer is None else require(buffer.event, "the event of a buffer")
        event.record()
        return event

    # --- requests -----------------------------------------------------------------------------------------------

    def opened(self, name: str, prompt: Sequence[int] = ()) -> None:
        """Resets the state of a new request's slot."""
        slot = self._store.live[name]
        if self._store.slots > len(self._row_of_slot):
            self._grow(self._store.slots)
        self._last_position[slot] = -1
        self._row_of_slot[self._rows.slots] = -1
        self._rows = no_rows()  # looked up even with the same names: a new request may have an old one
        self._gate.reset(slot, prompt)
        if self.masks is not None:
            self.masks.clear(slot)
        if self.routed is not None:
            self.routed.clear(slot)

    def _grow(self, slots: int) -> None:
        """Makes room for more trajectories."""
        self._row_of_slot = grown(self._row_of_slot, slots, -1)
        self._last_position = grown(self._last_position, slots, -1)
        self.pending.grow(slots)
        self._gate.grow(slots if self._graphs is None else slots + 1)
        if self.masks is not None:
            self.masks.grow(slots)
        if self.routed is not None:
            self.routed.grow(slots)

    def closed(self, slot: int) -> None:
        """Drops the edit drawn for a gone request's next position, since its slot will be used again."""
        # Not in place: a pending step has the same array.
        self._drawn_positions = np.where(self._drawn_slots == slot, -1, self._drawn_positions)

    def _download(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", non_blocking=True)

    def _upload(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor
