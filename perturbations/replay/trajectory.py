# SPDX-License-Identifier: Apache-2.0
"""A trajectory after its rollout: its record, log-probabilities and sampling mask, as arrays and as bytes."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from perturbations.replay import packing
from perturbations.replay.sampling_mask import SamplingMask
from perturbations.seeds import SEED_BYTES

# The header of a record: flags (1 byte), model (2) and seed (6). A short response's record is mostly header, so every
# byte counts.
_HEADER = struct.Struct("<BH6s")
# The flags.
_WEIGHTS = 1 << 0  # there are weights; else there is one candidate with weight 1 at every position
_SIGMA = 1 << 1  # there are noise scales
_ONE_SIGMA = 1 << 2  # one noise scale stands for all positions
_WIDE_IDS = 1 << 3  # an id has three bytes; else two
_VECTORS = 1 << 4  # there are vectors
_NORMALIZER = 1 << 5  # there are normalizers

# The versions of the formats, which the checksums include.
_RECORD_VERSION = 5
_TRAJECTORY_VERSION = 1  # of every part but the record and the sampling mask, which have versions of their own

_32_BITS = 0xFFFFFFFF
_BYTE_VALUES = np.array([1, 1 << 8, 1 << 16], dtype=np.int32)

# Bytes of a trajectory's name and objects: the growth of a process (Python 3.11, numpy 2) that holds 50,000 of them.
OVERHEAD = 1300


def model_fingerprint(vocabulary: int, hidden: int, module: bool = False) -> int:
    """A hash in [1, 2^16) of the embedding matrix's shape (V, D), and whether inputs pass a perturbation's module."""
    text = f"{vocabulary} {hidden}"
    if module:
        text += " module"
    return zlib.crc32(text.encode()) % 0xFFFF + 1


@dataclass(frozen=True, eq=False)
class ReplayRecord:
    """The perturbed inputs of one trajectory of N perturbed positions.

    Attributes:
        seed: in [0, 2^48), from which noise is drawn again.
        prompt_tokens, num_tokens: length of the prompt, and of the trajectory with it.
        positions: ascending, counted from the first prompt token, (N,) int32.
        ids, weights: candidates, (N, K) int32, and their weights, (N, K) float32.
        sigma: noise scales, (N,) float32, or None without noise.
        agreed: whether the text has the token that was sampled without perturbation, (N,) bool.
        vectors: added to the mixture, (N, D) float32, or None: 4·D bytes per perturbed position.
        normalizer: of the weights, (N,) float32, or None where no density needs it.
        model: :func:`model_fingerprint` of the model with the tokens ``ids``; 0 where it is not known.
    """

    seed: int
    prompt_tokens: int
    num_tokens: int
    positions: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    sigma: np.ndarray | None
    agreed: np.ndarray
    vectors: np.ndarray | None = None
    normalizer: np.ndarray | None = None
    model: int = 0

    def __len__(self) -> int:
        return len(self.positions)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReplayRecord) and self.to_bytes() == other.to_bytes()

    @property
    def size(self) -> int:
        """Bytes held."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, np.ndarray))

    def truncate(self, num_tokens: int) -> ReplayRecord:
        """The record of the trajectory's first ``num_tokens`` tokens."""
        if num_tokens >= self.num_tokens:
            return self
        count = int(np.searchsorted(self.positions, num_tokens))
        arrays = {name: value[:count] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        prompt_tokens = min(self.prompt_tokens, num_tokens)
        return dataclasses.replace(self, prompt_tokens=prompt_tokens, num_tokens=num_tokens, **arrays)

    def check_model(self, vocabulary: int, hidden: int, module: bool | None = None) -> None:
        """Raises ``ValueError`` for a record of another model; ``module``: whether a perturbation's is attached."""
        without_module = model_fingerprint(vocabulary, hidden)
        with_module = model_fingerprint(vocabulary, hidden, module=True)
        # The two fingerprints of a shape may be equal, and then do not say whether inputs passed a module.
        says_module = with_module != without_module
        if module is True and says_module and self.model == without_module:
            raise ValueError("replay record: its inputs passed no learned module, and this model has one. Detach it.")
        if module is False and says_module and self.model == with_module:
            raise ValueError(
                "replay record: its inputs passed the perturbation's learned module, and this model has none."
                " Attach it: perturbations.parameters.attach(model, perturbation)."
            )
        if self.model not in (0, without_module, with_module):
            raise ValueError(
                "replay record: it is of another model, and cannot be replayed in a model with"
                f" {vocabulary} tokens and {hidden} dimensions."
                " Rollout and replay must have the same vocabulary and the same hidden size."
            )
        self.check_tokens(vocabulary)
        if self.vectors is not None and self.vectors.shape[1] != hidden:
            raise ValueError(
                f"replay record: vectors of {self.vectors.shape[1]} dimensions do not fit a model with"
                f" {vocabulary} tokens and {hidden} dimensions."
            )

    def check_tokens(self, vocabulary: int) -> None:
        """Raises ``ValueError`` where a candidate is none of the V tokens of a vocabulary."""
        lowest = int(self.ids.min(initial=0))
        highest = int(self.ids.max(initial=0))
        if lowest < 0 or highest >= vocabulary:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"replay record: token id {wrong} is none of the model's: 0 to {vocabulary - 1}.")

    def to_bytes(self) -> bytes:
        """The record as bytes, without loss; :meth:`from_bytes` reads them. In this order:

        1. flags, model and seed (``_HEADER``);
        2. varints: K, the prompt's tokens, the generated tokens, N, and with vectors D;
        3. N varints, 2 · step + agreed, with the steps from one position to the next, mostly one byte each;
        4. N · K ids of two or three bytes;
        5. float32 arrays, where the flags name them: weights, N · K; sigma, N or 1; normalizer, N; vectors, N · D;
        6. the checksum.

        ``ValueError`` for more than 4096 candidates, a token id of 2^24 or more, or a seed outside [0, 2^48).
        """
        if not 0 <= self.seed < 1 << 8 * SEED_BYTES:
            raise ValueError(f"replay record: seed {self.seed} must be in [0, 2^48); take one of trajectory_seed().")
        count, width = self.ids.shape
        if width > packing.MOST_CANDIDATES:
            raise ValueError(
                f"replay record: {width} candidates of a position; there may be 1 to {packing.MOST_CANDIDATES}."
                " Mix fewer tokens, often the option k."
            )
        largest_id = int(self.ids.max(initial=0))
        if largest_id >= 1 << 24:
            raise ValueError(f"replay record: token id {largest_id} is too large; ids below {1 << 24} are supported.")

        flags = 0
        sizes = [width, self.prompt_tokens, self.num_tokens - self.prompt_tokens, count]

        steps = self.positions.astype(np.int64)
        steps[1:] -= self.positions[:-1]
        # The first step is from the prompt's end, modulo 2^32: a position of an earlier turn lies before that end.
        steps[:1] = (steps[:1] - self.prompt_tokens) & _32_BITS

        bytes_per_id = 2
        if largest_id >= 1 << 16:
            bytes_per_id = 3
            flags |= _WIDE_IDS
        id_bytes = np.ascontiguousarray(self.ids, "<u4").view(np.uint8).reshape(-1, 4)  # the lowest byte first
        id_bytes = id_bytes[:, :bytes_per_id]

        float_arrays = []
        is_one_token_alone = width == 1 and bool((self.weights == 1.0).all())
        if not is_one_token_alone:
            flags |= _WEIGHTS
            float_arrays.append(self.weights)
        if self.sigma is not None:
            flags |= _SIGMA
            if count > 0 and bool((self.sigma == self.sigma[0]).all()):
                flags |= _ONE_SIGMA
                float_arrays.append(self.sigma[:1])
            else:
                float_arrays.append(self.sigma)
        if self.normalizer is not None:
            flags |= _NORMALIZER
            float_arrays.append(self.normalizer)
        if self.vectors is not None:
            flags |= _VECTORS
            sizes.append(self.vectors.shape[1])
            float_arrays.append(self.vectors)

        return packing.sealed(
            [
                _HEADER.pack(flags, self.model, self.seed.to_bytes(SEED_BYTES, "little")),
                packing.varints(np.array(sizes)),
                packing.varints(2 * steps + self.agreed),
                id_bytes.tobytes(),
                *(packing.floats(array) for array in float_arrays),
            ],
            _RECORD_VERSION,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> ReplayRecord:
        """Reads what :meth:`to_bytes` wrote; ``ValueError`` for anything but a whole record of this version."""
        reader = packing.unsealed(data, _RECORD_VERSION, "replay record")
        flags, model, seed = _HEADER.unpack(reader.take(_HEADER.size))
        width, prompt_tokens, generated_tokens, count = reader.varints(4).tolist()
        hidden = reader.varint() if flags & _VECTORS else 0
        if width > packing.MOST_CANDIDATES or (count and not width):
            most = packing.MOST_CANDIDATES
            raise ValueError(f"replay record: {count} positions with {width} candidates each; there are 1 to {most}.")

        steps_and_agreed = reader.varints(count)
        agreed = steps_and_agreed % 2 == 1
        steps = steps_and_agreed >> 1
        if count:
            steps[0] = (int(steps[0]) + prompt_tokens) & _32_BITS
        positions = steps.cumsum()
        num_tokens = prompt_tokens + generated_tokens
        if num_tokens >= 1 << 31 or (count and (positions[-1] >= num_tokens or not steps[1:].all())):
            raise ValueError(
                f"replay record: positions that do not ascend, or that are outside of {num_tokens} tokens."
            )

        bytes_per_id = 3 if flags & _WIDE_IDS else 2
        id_bytes = np.frombuffer(reader.take(count * width * bytes_per_id), dtype=np.uint8).reshape(-1, bytes_per_id)
        ids = (id_bytes.astype(np.int32) @ _BYTE_VALUES[:bytes_per_id]).reshape(count, width)

        weights = reader.floats(count, width) if flags & _WEIGHTS else np.ones((count, width), dtype=np.float32)
        sigma = None
        if flags & _SIGMA and flags & _ONE_SIGMA:
            sigma = np.repeat(reader.floats(1), count)
        elif flags & _SIGMA:
            sigma = reader.floats(count)
        normalizer = reader.floats(count) if flags & _NORMALIZER else None
        vectors = reader.floats(count, hidden) if flags & _VECTORS else None
        reader.finish()

        return cls(
            seed=int.from_bytes(seed, "little"),
            prompt_tokens=prompt_tokens,
            num_tokens=num_tokens,
            positions=positions.astype(np.int32),
            ids=ids,
            weights=weights,
            sigma=sigma,
            agreed=agreed,
            vectors=vectors,
            normalizer=normalizer,
            model=model,
        )


@dataclass(frozen=True)
class UnperturbedResponse:
    """A short response without a perturbation."""

    tokens: np.ndarray  # prompt and response, (T,) int32
    log_probs: np.ndarray  # of the response at the rollout, (A,) float32
    experts: np.ndarray | None = None  # as :attr:`FinishedTrajectory.experts`


@dataclass(frozen=True, eq=False)
class FinishedTrajectory:
    """A trajectory after its rollout.

    Attributes:
        record: its perturbed inputs.
        log_probs: log π at the rollout of the trajectory's last L tokens, (L,) float32. From a worker these are the
            generated tokens; in a whole conversation they are all tokens, NaN where a token was not generated. It is
            at the temperature of the draw (the request's, times a schedule's factor), before top-k, top-p and min-p,
            and after all other changes of the logits (penalties, biases, lists of tokens). An engine that records
            sampling masks without ``full_log_probs`` takes it over the tokens left.
        sampling_mask: the tokens that sampling left; None where these are not recorded.
        dropped: how many edits of earlier turns were left out, since an agent or chat template has changed the tokens.
        prompted: how many tokens the prompts of all turns have.
        cached: how many of these were in the engine's prefix cache.
        unperturbed: a short response of the same engine with the perturbation off, mostly None.
        experts: in a mixture of experts, the K experts of each of its L layers for the first P tokens, (P, L, K) uint8,
            or uint16 for more than 256 experts: L·K or 2·L·K bytes a token; None where they are not recorded.
    """

    record: ReplayRecord
    log_probs: np.ndarray
    sampling_mask: SamplingMask | None = None
    dropped: int = 0
    prompted: int = 0
    cached: int = 0
    unperturbed: UnperturbedResponse | None = None
    experts: np.ndarray | None = None

    @property
    def size(self) -> int:
        """Bytes of memory that holding it takes."""
        size = OVERHEAD + self.record.size + self.log_probs.nbytes
        if self.sampling_mask is not None:
            size += self.sampling_mask.nbytes
        if self.experts is not None:
            size += self.experts.nbytes
        return size

    def truncate(self, num_tokens: int) -> FinishedTrajectory:
        """The trajectory's first ``num_tokens`` tokens."""
        beyond = self.record.num_tokens - num_tokens
        if beyond <= 0:
            return self
        return dataclasses.replace(
            self,
            record=self.record.truncate(num_tokens),
            log_probs=self.log_probs[: max(len(self.log_probs) - beyond, 0)],
            sampling_mask=None if self.sampling_mask is None else self.sampling_mask.truncate(num_tokens),
            experts=None if self.experts is None else self.experts[:num_tokens],
        )

    def pack(self) -> dict[str, bytes]:
        """The trajectory as byte strings by name, without loss: trainers move tensors to a device, and not bytes."""
        packed = {
            packing.RECORD: self.record.to_bytes(),
            packing.LOG_PROBS: _sealed([packing.floats(self.log_probs)]),
        }
        counts = (self.dropped, self.prompted, self.cached)
        if any(counts):
            packed[packing.COUNTS] = _sealed([packing.varints(np.array(counts))])
        if self.unperturbed is not None:
            response = self.unperturbed
            packed[packing.UNPERTURBED] = _sealed(
                [
                    packing.varint(len(response.tokens)),
                    response.tokens.astype("<i4").tobytes(),
                    packing.floats(response.log_probs),
                ]
            )
            if response.experts is not None:
                packed[packing.UNPERTURBED_EXPERTS] = _sealed(packing.experts(response.experts))
        if self.experts is not None:
            packed[packing.EXPERTS] = _sealed(packing.experts(self.experts))
        if self.sampling_mask is not None:
            packed[packing.MASK] = self.sampling_mask.to_bytes()
        return packed

    @classmethod
    def unpack(cls, parts: Mapping[str, bytes]) -> FinishedTrajectory:
        """Reads what :meth:`pack` wrote; ``ValueError`` where bytes were cut or altered on their way."""

        def reader(name: str) -> packing.Reader:
            return packing.unsealed(parts[name], _TRAJECTORY_VERSION, name)

        def experts(name: str) -> np.ndarray | None:
            return reader(name).experts() if name in parts else None

        sampling_mask = None
        if packing.MASK in parts:
            sampling_mask = SamplingMask.from_bytes(parts[packing.MASK])
        dropped, prompted, cached = 0, 0, 0
        if packing.COUNTS in parts:
            dropped, prompted, cached = reader(packing.COUNTS).varints(3).tolist()
        unperturbed = None
        if packing.UNPERTURBED in parts:
            response = reader(packing.UNPERTURBED)
            token_count = response.varint()
            unperturbed = UnperturbedResponse(
                tokens=np.frombuffer(response.take(4 * token_count), "<i4").astype(np.int32),
                log_probs=response.all_floats(),
                experts=experts(packing.UNPERTURBED_EXPERTS),
            )
        return cls(
            record=ReplayRecord.from_bytes(parts[packing.RECORD]),
            log_probs=reader(packing.LOG_PROBS).all_floats(),
            sampling_mask=sampling_mask,
            dropped=dropped,
            prompted=prompted,
            cached=cached,
            unperturbed=unperturbed,
            experts=experts(packing.EXPERTS),
        )


def _sealed(data: list[bytes]) -> bytes:
    return packing.sealed(data, _TRAJECTORY_VERSION)
