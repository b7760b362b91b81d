# SPDX-License-Identifier: Apache-2.0
"""The hot path: what happens to each step of a vLLM model runner when a perturbation is on.

1. ``begin``, before the forward: the edits drawn after the last step are written into the embedding's override;
   positions that are computed again, after a preemption or in a further turn, get theirs from the store.
2. ``finish``, instead of vLLM's sampler: the next tokens are drawn, and the edits of the rows that the gate selects.
   The host knows these rows without logits, so nothing waits for the device.
3. The draws are copied to the host while further steps run (`async_scheduling.py`), then written into the store.

`requests.py` opens and closes slots. A slot has a trajectory's state in the store, the gate and the masks, also during
preemption, until its last note is in the store.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from ngrpo.methods.sampling_schedules.base import NextTokens, SamplingSchedule
from ngrpo.rollout.async_scheduling import Note, Notes
from ngrpo.rollout.input_override import InputOverride
from ngrpo.rollout.routed_experts import RoutedExperts
from ngrpo.rollout.sampling_support import SamplingMaskStore, SamplingSupport
from ngrpo.rollout.step_kernels import STREAMS, Logits, StepKernels
from ngrpo.rollout.trajectories import TrajectoryStore, grown
from perturbations import InputEdit, Perturbation, Positions, streams
from perturbations.edit import realise
from perturbations.embeddings import ModelEmbeddings
from perturbations.errors import require
from perturbations.gates.default import BoundGate

# Candidates of stored edits that are mixed at once; as many as were rehearsed, where those are more.
REPLAY_CHUNK = 1024


@dataclass(frozen=True)
class Batch:
    """The step in flight: which trajectory each row belongs to, and where its next token goes."""

    slots: np.ndarray
    next_positions: np.ndarray
    sampled: np.ndarray


@dataclass(frozen=True)
class Edits:
    """Edits drawn in the last step, still on the device: row i is (slots[i], positions[i])."""

    slots: np.ndarray
    positions: np.ndarray
    vectors: Tensor
    fed: Tensor


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
        schedule: SamplingSchedule | None = None,
        routed: RoutedExperts | None = None,
    ) -> None:
        self._perturbation, self._store, self._gate = perturbation, store, gate
        self._embeddings, self._override, self.device = embeddings, override, device
        self._module, self.masks, self._schedule, self.routed = module, masks, schedule, routed
        self._kernels = StepKernels(perturbation, gate, embeddings, override.lookup, device, module, masks is not None)
        self._names: list[str] = []
        self._slots = np.zeros(0, dtype=np.int64)
        self._training_steps = torch.zeros(0, dtype=torch.int64)
        self._answers = torch.zeros(2, 0, dtype=torch.int64)
        self._row_of_slot = np.full(store.slots, -1, dtype=np.int64)
        self._last_position = np.full(store.slots, -1, dtype=np.int64)
        self._edits: Edits | None = None
        self._hidden: Tensor | None = None
        self._batch: Batch | None = None
        self._at_once = REPLAY_CHUNK
        self.notes = Notes(store, masks, routed, lambda: self._event())

    # --- before the forward -------------------------------------------------------------------------------------

    def begin(self, names: Sequence[str], starts: np.ndarray, counts: np.ndarray, discard: np.ndarray) -> None:
        """Prepares the override for a forward of B requests from their first positions on, (B,) each.

        ``discard``: prefills that are not complete, so that their samples are thrown away, (B,) bool.
        """
        self._locate_rows(names)
        slots, ends = self._slots, starts + counts
        last_rows = np.cumsum(counts) - 1
        edits = self._edits
        rows = np.zeros(0, dtype=np.int64) if edits is None else self._row_of_slot[edits.slots]
        if edits is None or not (present := (rows >= 0) & (ends[rows] - 1 == edits.positions)).any():
            self._override.clear()
        else:
            vectors, fed, target = edits.vectors, edits.fed, last_rows[rows[present]]
            self._override.clear(rewritten=target)
            if not present.all():
                keep = self._upload(present.nonzero()[0])
                vectors, fed = vectors[keep], fed[keep]
            self._override.put(self._upload(target), vectors, fed, target)
        # Ordinary decoding computes just the position that the last step drew; the rest comes from the store.
        fresh = (counts == 1) & (starts == self._last_position[slots])
        stored = (~fresh | self._store.ahead[slots]) & self._store.has_edits[slots]
        for row in stored.nonzero()[0]:
            self._place_stored(int(slots[row]), int(starts[row]), int(counts[row]), int(last_rows[row]))
        self._batch = Batch(slots, ends, ~discard)
        if self.routed is not None:
            self.routed.begin(slots, starts, counts, ~discard)

    def _locate_rows(self, names: Sequence[str]) -> None:
        if names == self._names:
            return
        self._row_of_slot[self._slots] = -1
        self._names = list(names)
        self._slots = np.array([self._store.live[name] for name in names], dtype=np.int64)
        self._row_of_slot[self._slots] = np.arange(len(names))
        if self._schedule is not None:
            self._training_steps = self._upload(self._store.training_steps[self._slots])
            self._answers = self._upload(self._store.answers[self._slots].T)

    def _place_stored(self, slot: int, start: int, count: int, last_row: int) -> None:
        """Recomputation: after a preemption, or for positions that a record of earlier turns covers."""
        self.notes.drain_slot(slot)
        edits = self._store.edits(slot, start, start + count)
        if not edits:
            return
        positions = edits["positions"].astype(np.int64)
        rows = last_row - (start + count - 1) + positions
        noise = streams.keys(np.full_like(positions, self._store.seeds[slot]), positions, streams.Stream.NOISE)
        module = None if self._store.ahead[slot] else self._module
        # A chunk has many times the rows that vLLM measured its memory with. Noise takes as much as four candidates.
        size = max(self._at_once // max(edits["ids"].shape[1], 4), 1)
        for block in (slice(first, first + size) for first in range(0, len(rows), size)):
            ids, weights = self._upload(edits["ids"][block].astype(np.int64)), self._upload(edits["weights"][block])
            others = {name: self._upload(edits[name][block]) for name in ("sigma", "vectors") if name in edits}
            edit = InputEdit(ids, weights, **others)
            vectors = realise(edit, self._override.lookup, self._upload(noise[block]), module)
            self._override.put(self._upload(rows[block]), vectors)

    # --- after the logits ---------------------------------------------------------------------------------------

    def computed(self, hidden: Tensor) -> None:
        """The model computes logits of these last hidden states, (B, D): :meth:`finish` is called with theirs next."""
        self._hidden = hidden

    @property
    def busy(self) -> bool:
        """Whether a step of real requests is in flight (a warm-up run is not)."""
        return self._batch is not None

    def rehearse(self, logits: Tensor, edits: bool = True) -> None:
        """Does a step's work on logits (B, V) of any values: vLLM measures its memory, and its parts are compiled."""
        self._kernels.rehearse(logits, edits)
        self._at_once = max(self._at_once, self._kernels.candidates * len(logits))
        # One row for all, as there.
        scaled, rows = logits[:1].float().repeat(len(logits), 1), torch.arange(len(logits), device=logits.device)
        if self.masks is not None:
            SamplingSupport(scaled, self._download).rehearse()
        if self._schedule is not None:
            self._schedule.factor(NextTokens(scaled, torch.ones_like(scaled[:, 0]), rows, rows, rows, rows + 1))

    def temperature_factor(self, scaled: Tensor, temperature: Tensor, greedy: Tensor | None) -> Tensor | None:
        """The factor of each temperature (B,), 1 where no schedule applies; None for no schedule."""
        if self._schedule is None:
            return None
        # A prompt that is not complete yet draws a token that is thrown away.
        batch = require(self._batch, "the batch of begin()")
        generated = np.maximum(batch.next_positions - self._store.prompts[batch.slots], 0)
        steps = self._training_steps
        at = NextTokens(scaled.float(), temperature, self._upload(generated), steps.clamp_min(0), *self._answers)
        factor = self._schedule.factor(at)
        if factor is None:
            return None
        applies = steps >= 0 if greedy is None else (steps >= 0) & (greedy < 0)
        return torch.where(applies, factor, 1.0)

    def finish(self, scaled: Tensor, temperature: Tensor, drawable: Tensor, greedy: Tensor | None) -> Tensor:
        """Draws the next tokens, (B,) int64, and the edits of the gated rows.

        ``scaled``: z̃, (B, V), float32; or as the model computes them, where no request changes or filters any.
        ``temperature``: (B,) float32, 1 for greedy rows. ``drawable``: logits after top-k, top-p and min-p, (B, V)
        float32. ``greedy``: argmax tokens for greedy rows and -1 elsewhere, (B,) int64; None where no row is greedy.
        """
        batch, self._batch = require(self._batch, "the batch of begin()"), None
        hidden, self._hidden = self._hidden, None
        if hidden is not None and len(hidden) != len(scaled):
            raise RuntimeError(f"{len(scaled)} rows are sampled, of logits of {len(hidden)} last hidden states.")
        store = self._store
        at = Positions(store.seeds[batch.slots], store.prompts[batch.slots], batch.next_positions)
        within = batch.sampled & (batch.next_positions < store.length)
        gated = self._gate.selected(at, within & store.perturbed[batch.slots])
        keys = at.keys(streams.Stream.TOKEN)
        rows = np.stack([batch.slots, at.first, at.positions, batch.sampled, at.seeds, keys], axis=1)
        selected = np.stack([gated, *streams.of_streams(at.mixed[gated], STREAMS)], axis=1)
        # One copy; the gated rows begin at 16 bytes, or a kernel would copy them once more.
        both = self._upload(np.concatenate([rows.ravel(), selected.ravel()]))
        of_rows, of_gated = both[: rows.size].view(rows.shape), both[rows.size :].view(selected.shape)
        logits = Logits(scaled, temperature, None if drawable is scaled else drawable, greedy, hidden)
        tokens, log_probs, vectors, edits = self._kernels.step(of_rows, of_gated, logits)
        edited = batch.slots[gated], batch.next_positions[gated]
        self._edits = None if vectors is None else Edits(*edited, vectors, edits["fed"])
        support = None if self.masks is None else SamplingSupport(drawable, self._download)
        log_probs = self._download(log_probs)
        edits = {name: self._download(part) for name, part in edits.items()}
        routed = None if self.routed is None else self.routed.take(self._download)
        ready = self._event()
        slots, at_next, kept = batch.slots, batch.next_positions, None
        if not within.all():
            kept = within.nonzero()[0]
            slots, at_next = slots[kept], at_next[kept]
        # Only what this very step drew can be fresh in the next one; anything older comes from the store.
        self._last_position.fill(-1)
        self._last_position[slots] = at_next
        self._store.has_edits[edited[0]] = True
        self.notes.add(Note(ready, slots, at_next, kept, log_probs, support, edited, edits, routed))
        return tokens

    def _event(self) -> torch.cuda.Event | None:
        """Tells when earlier copies have arrived; None where they have."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    # --- requests -----------------------------------------------------------------------------------------------

    def opened(self, name: str, prompt: Sequence[int] = ()) -> None:
        """A request has its slot: the row's state starts afresh."""
        slot = self._store.live[name]
        if self._store.slots > len(self._row_of_slot):
            self._row_of_slot = grown(self._row_of_slot, self._store.slots, -1)
            self._last_position = grown(self._last_position, self._store.slots, -1)
            for each in (self.notes, self.masks, self._gate, self.routed):
                if each is not None:
                    each.grow(self._store.slots)
        self._last_position[slot] = -1
        self._gate.reset(slot, prompt)
        for kept in (self.masks, self.routed):
            if kept is not None:
                kept.clear(slot)

    def closed(self, slot: int) -> None:
        """A request is gone; an edit drawn for its next position is dropped, since its slot will be used again."""
        if self._edits is not None:
            kept = np.where(self._edits.slots == slot, -1, self._edits.positions)  # a note has the same array
            self._edits = replace(self._edits, positions=kept)

    def _download(self, part: Tensor) -> Tensor:
        return part.to("cpu", non_blocking=True)

    def _upload(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor
