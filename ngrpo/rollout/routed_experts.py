# SPDX-License-Identifier: Apache-2.0
"""The experts that a mixture of experts sends each token to, K of each of its L layers.

A hook of vLLM's routers notes them on the device. They are copied to the host with a step's draws, and kept by slot.
The tokens of a prompt that vLLM finds in its prefix cache are not computed again: they have the experts of the request
that computed them, which are kept by the place of a token in the KV cache. (vLLM's own `enable_return_routed_experts`
does not run with the CPU kernels of 0.29.)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ngrpo.machine.upstream.types import MoERunner, RunnerV1, SchedulerOutput
from ngrpo.rollout.chunks import Chunks, grown, ranges
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations.errors import UsageError, require

_MOST_IN_A_BYTE = 256


class CachedTokens(NamedTuple):
    """Tokens of one prompt that vLLM found in its prefix cache, (P,) int64 each."""

    slot: int
    positions: np.ndarray
    places: np.ndarray  # in the KV cache


@dataclass(frozen=True)
class ForwardTokens:
    """The N tokens of a forward, row by row, and those that it took from the prefix cache.

    Attributes:
        slots: of their trajectories, (N,) int64.
        positions: in their trajectories, (N,) int64.
        drawn: whether the next token is drawn from this one's row, (N,) bool.
        places: of prompt tokens in the KV cache, -1 elsewhere, (N,) int64.
        cached: of each prompt that had some in the prefix cache.
    """

    slots: np.ndarray
    positions: np.ndarray
    drawn: np.ndarray
    places: np.ndarray
    cached: list[CachedTokens]


@dataclass(frozen=True)
class RoutedStep:
    """A step's experts on their way to the host, (N, L·K), and the tokens that they belong to."""

    experts: Tensor
    tokens: ForwardTokens


class RoutedExperts:
    """Experts of the running step, and of live trajectories by slot."""

    def __init__(self, runner: RunnerV1) -> None:
        """runner: of vLLM, V1 or V2, its model loaded.

        Raises:
            UsageError: for a model without experts, or a kernel that does not show its choice.
        """
        model = runner.get_model()
        layers = _layers(model)
        self._shape = (len(layers), _experts_per_token(model, layers))
        experts = max(layer.moe_config.num_logical_experts for layer in layers)
        dtype = torch.uint8 if experts <= _MOST_IN_A_BYTE else torch.int16
        # The experts of the running forward, (rows of the largest forward, L, K).
        self._step = torch.zeros(runner.max_num_tokens, *self._shape, dtype=dtype, device=runner.device)
        self._layers = layers
        self._runner = runner
        self.watch()
        # Experts by place in the KV cache, (places, L·K), for prompts that share blocks; None until there is one.
        self._cache: np.ndarray | None = None
        self._tokens: ForwardTokens | None = None  # of the running forward

    def watch(self) -> None:
        """Has the layers hand over their choices; also after a weight sync, which may have made new kernels."""
        for number, layer in enumerate(self._layers):
            _watch(layer, partial(self._note, number))

    def _note(self, layer: int, ids: Tensor) -> None:
        """A layer's choice for the rows of a forward, (rows, K)."""
        self._step[: len(ids), layer] = ids.to(self._step.dtype)

    # --- requests -----------------------------------------------------------------------------------------------

    def restart(self, store: TrajectoryStore) -> None:
        """Keeps experts for another store's trajectories from now on; those kept by place in the KV cache stay."""
        self._store = store
        self._rows = Chunks(store.slots)  # ``experts`` of each slot's tokens
        self._scheduled = np.zeros(store.slots, dtype=np.int64)  # tokens of each slot that were computed or cached
        self._blocks: dict[int, list[int]] = {}  # of the KV cache, by slot; empty without prefix caching

    def grow(self, slots: int) -> None:
        """Makes room for more slots."""
        self._rows.grow(slots)
        self._scheduled = grown(self._scheduled, slots)

    def clear(self, slot: int) -> None:
        """Forgets a slot's experts, as a trajectory begins there."""
        self._rows.clear(slot)
        self._scheduled[slot] = 0

    def follow(self, scheduled: SchedulerOutput, live: Mapping[str, int]) -> None:
        """Takes in which blocks of the KV cache requests have; needed where prompts share them."""
        if not self._runner.vllm_config.cache_config.enable_prefix_caching:
            return
        group = self._group()
        for request in scheduled.scheduled_new_reqs:
            self._blocks[live[request.req_id]] = list(request.block_ids[group])
        cached = scheduled.scheduled_cached_reqs  # vLLM's name for requests that its workers have already
        for name, blocks in zip(cached.req_ids, cached.new_block_ids):
            if blocks is not None:
                slot = live[name]
                before = [] if name in cached.resumed_req_ids else self._blocks[slot]
                self._blocks[slot] = [*before, *blocks[group]]

    def _group(self) -> int:
        """The number of the group of the KV cache that keeps all tokens of a request."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        for number, group in enumerate(self._runner.kv_cache_config.kv_cache_groups):
            specs = getattr(group.kv_cache_spec, "kv_cache_specs", {"all": group.kv_cache_spec})
            if all(isinstance(spec, FullAttentionSpec) for spec in specs.values()):
                return number
        raise UsageError(
            "routed experts: no part of this model's KV cache keeps whole prompts. Give enable_prefix_caching=False."
        )

    def _block_size(self) -> int:
        """Tokens of a block of that group."""
        return self._runner.kv_cache_config.kv_cache_groups[self._group()].kv_cache_spec.block_size

    def _places(self, slot: int, positions: np.ndarray) -> np.ndarray:
        """Where the tokens at these positions of a slot are in the KV cache, (N,) int64."""
        size = self._block_size()
        blocks = np.array(self._blocks[slot], dtype=np.int64)
        return blocks[positions // size] * size + positions % size

    # --- a step -------------------------------------------------------------------------------------------------

    def begin(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, keeps_token: np.ndarray) -> None:
        """The next forward computes ``counts`` tokens of each slot; arguments as in the perturber, (B,) each."""
        ends = np.cumsum(counts)
        positions = ranges(starts, counts)
        drawn = np.zeros(len(positions), dtype=bool)
        drawn[ends - 1] = keeps_token
        places = np.full(len(positions), -1)
        cached: list[CachedTokens] = []
        if self._blocks:
            prompt_lengths = self._store.prompt_lengths[slots]
            for row in (starts < prompt_lengths).nonzero()[0]:
                slot = int(slots[row])
                rows = slice(int(ends[row] - counts[row]), int(ends[row]))
                places[rows] = self._places(slot, positions[rows])
                skipped = np.arange(self._scheduled[slot], starts[row])
                if len(skipped):
                    cached.append(CachedTokens(slot, skipped, self._places(slot, skipped)))
            self._scheduled[slots] = np.maximum(self._scheduled[slots], starts + counts)
            # Blocks of generated tokens are their trajectory's own: only prompts are shared.
            places[positions >= np.repeat(prompt_lengths, counts)] = -1
        self._tokens = ForwardTokens(
            slots=np.repeat(slots, counts),
            positions=positions,
            drawn=drawn,
            places=places,
            cached=cached,
        )

    def take(self, download: Callable[[Tensor], Tensor]) -> RoutedStep:
        """The experts of the forward that :meth:`begin` announced."""
        tokens = require(self._tokens, "the tokens of begin()")
        experts = self._step[: len(tokens.slots)].flatten(1).clone()
        return RoutedStep(download(experts), tokens)

    def write(self, step: RoutedStep) -> None:
        """Keeps a step's experts, which have arrived; a token that is computed again keeps those of its draw."""
        tokens = step.tokens
        experts = step.experts.numpy()
        if experts.dtype != np.uint8:
            experts = experts.view(np.uint16)
        of_prompts = tokens.places >= 0
        if of_prompts.any():
            self._experts_in_cache(experts)[tokens.places[of_prompts]] = experts[of_prompts]
        for cached in tokens.cached:
            fields = {"experts": self._experts_in_cache(experts)[cached.places]}
            self._rows.write(np.full_like(cached.positions, cached.slot), cached.positions, fields)
        kept = (tokens.positions >= self._rows.counts[tokens.slots]) | tokens.drawn
        self._rows.write(tokens.slots[kept], tokens.positions[kept], {"experts": experts[kept]})

    def _experts_in_cache(self, like: np.ndarray) -> np.ndarray:
        """Experts by place in the KV cache, (places, L·K) as ``like``; memory is committed where prompts have been."""
        if self._cache is None:
            places = self._runner.kv_cache_config.num_blocks * self._block_size()
            self._cache = np.zeros((places, like.shape[1]), dtype=like.dtype)
        return self._cache

    def read(self, slot: int) -> np.ndarray:
        """The experts of a slot's first P tokens, (P, L, K) uint8 or uint16."""
        experts = self._rows.read(slot).get("experts", np.zeros((0, 1), dtype=np.uint8))
        return experts.reshape(len(experts), *self._shape)


def _layers(model: nn.Module) -> list[MoERunner]:
    """The layers of experts, in the model's order."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    return [module for module in model.modules() if isinstance(module, MoERunner)]


def _experts_per_token(model: nn.Module, layers: list[MoERunner]) -> int:
    """K of all layers; UsageError where they differ, and for a model without experts."""
    numbers = sorted({layer.moe_config.experts_per_token for layer in layers})
    name = type(model).__name__
    if not numbers:
        raise UsageError(
            f"routed experts: {name} has 0 layers of experts: it is a dense model. Leave --replay.routing out."
        )
    if len(numbers) > 1:
        raise UsageError(
            f"routed experts: {name} has {len(layers)} layers of experts with {numbers} experts a token: one number is"
            " needed. Leave --replay.routing out."
        )
    return numbers[0]


def _watch(layer: MoERunner, take: Callable[[Tensor], None]) -> None:
    """Has a layer hand over the experts that it chose, (rows, K), in each forward; UsageError where it cannot."""
    if not layer.is_monolithic:
        layer.router.set_capture_fn(take)
        return
    kernel = getattr(getattr(layer._quant_method, "moe_kernel", None), "fused_experts", None)
    asks_support = getattr(kernel, "supports_routing_replay_capture", None)
    supports_capture = asks_support is not None and asks_support()
    if supports_capture and hasattr(kernel, "set_capture_fn"):  # vLLM 0.32 has no such method
        kernel.set_capture_fn(take)
        return
    select = getattr(type(kernel), "_select_experts", None)  # of the CPU kernels of vLLM 0.28 and 0.29
    if kernel is None or select is None:
        inside = type(layer._quant_method if kernel is None else kernel).__name__
        raise UsageError(
            f"routed experts: vLLM's {inside} chooses experts inside and does not show them in this release. Leave"
            " --replay.routing out, or choose another MoE backend of vLLM."
        )

    def chosen(*args: object, **kwargs: object) -> Any:
        weights, ids = select(kernel, *args, **kwargs)
        take(ids)
        return weights, ids

    kernel._select_experts = chosen
