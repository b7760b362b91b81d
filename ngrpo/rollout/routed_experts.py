# SPDX-License-Identifier: Apache-2.0
"""The experts that a mixture of experts sends each token to, K of each of its L layers.

The hook of vLLM's routers notes them on the device; they are copied with a step's draws, and kept by slot. A prompt in
the prefix cache has the experts of the request that computed it, by the places of its blocks. (vLLM's own
`enable_return_routed_experts` does not run with the CPU kernels of 0.29.)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ngrpo.machine.upstream.types import MoERunner, RunnerV1, SchedulerOutput
from ngrpo.rollout.chunks import Chunks, grown
from ngrpo.rollout.trajectories import TrajectoryStore
from perturbations.errors import UsageError

_MOST_IN_A_BYTE = 256


@dataclass(frozen=True)
class RoutedStep:
    """A step's experts on their way to the host, and the N tokens that they belong to, (N,) each."""

    experts: Tensor  # (N, L·K)
    slots: np.ndarray
    positions: np.ndarray
    drawn: np.ndarray  # whether the next token was drawn from this one's row
    places: np.ndarray  # of prompt tokens in the KV cache, -1 elsewhere
    shared: list[tuple[int, np.ndarray, np.ndarray]]  # slot, positions and places of tokens found in the prefix cache


class RoutedExperts:
    """Experts of the running step, and of live trajectories by slot."""

    def __init__(self, runner: RunnerV1) -> None:
        """runner: of vLLM, V1 or V2, its model loaded.

        Raises:
            UsageError: for a model without experts, or a kernel that does not show its choice.
        """
        layers = _layers(runner.get_model())
        each = {layer.moe_config.experts_per_token for layer in layers}
        if len(each) != 1:
            what = f"{type(runner.get_model()).__name__} has {len(layers)} layers of experts"
            how = f" with {sorted(each)} experts a token: one number is needed" if layers else ": it is a dense model"
            raise UsageError(f"routed experts: {what}{how}. Leave --replay.routing out.")
        few = max(layer.moe_config.num_logical_experts for layer in layers) <= _MOST_IN_A_BYTE
        self._shape = len(layers), each.pop()
        dtype = torch.uint8 if few else torch.int16
        self._step = torch.zeros(runner.max_num_tokens, *self._shape, dtype=dtype, device=runner.device)
        self._layers, self._runner = layers, runner
        self.watch()
        self._cache: np.ndarray | None = None  # experts by place in the KV cache
        self._layout: tuple[Any, ...] = ()

    def watch(self) -> None:
        """Has the layers hand over their choices; also after a weight sync, which may have made new kernels."""
        for number, layer in enumerate(self._layers):
            _watch(layer, partial(self._note, number))

    def _note(self, layer: int, ids: Tensor) -> None:
        self._step[: len(ids), layer] = ids.to(self._step.dtype)

    # --- requests -----------------------------------------------------------------------------------------------

    def restart(self, store: TrajectoryStore) -> None:
        """Another store's trajectories from now on; what the KV cache holds stays."""
        self._store, self._rows = store, Chunks(store.slots)
        self._scheduled = np.zeros(store.slots, dtype=np.int64)  # tokens of each slot that were computed or cached
        self._blocks: dict[int, list[int]] = {}

    def grow(self, slots: int) -> None:
        """Makes room for more slots."""
        self._rows.grow(slots)
        self._scheduled = grown(self._scheduled, slots)

    def clear(self, slot: int) -> None:
        """A trajectory begins."""
        self._rows.clear(slot)
        self._scheduled[slot] = 0

    def follow(self, scheduled: SchedulerOutput, live: Mapping[str, int]) -> None:
        """Takes in which blocks of the KV cache requests have; needed where prompts share them."""
        if not self._runner.vllm_config.cache_config.enable_prefix_caching:
            return
        group, cached = self._group(), scheduled.scheduled_cached_reqs
        for new in scheduled.scheduled_new_reqs:
            self._blocks[live[new.req_id]] = list(new.block_ids[group])
        for name, blocks in zip(cached.req_ids, cached.new_block_ids):
            if blocks is not None:
                slot = live[name]
                before = [] if name in cached.resumed_req_ids else self._blocks[slot]
                self._blocks[slot] = [*before, *blocks[group]]

    def _group(self) -> int:
        """The group of the KV cache that keeps all tokens of a request."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        for number, group in enumerate(self._runner.kv_cache_config.kv_cache_groups):
            of_layers = getattr(group.kv_cache_spec, "kv_cache_specs", {"all": group.kv_cache_spec})
            if all(isinstance(spec, FullAttentionSpec) for spec in of_layers.values()):
                return number
        why = "no part of this model's KV cache keeps whole prompts"
        raise UsageError(f"routed experts: {why}. Give enable_prefix_caching=False.")

    def _places(self, slot: int, positions: np.ndarray) -> np.ndarray:
        size = self._runner.kv_cache_config.kv_cache_groups[self._group()].kv_cache_spec.block_size
        return np.array(self._blocks[slot], dtype=np.int64)[positions // size] * size + positions % size

    # --- a step -------------------------------------------------------------------------------------------------

    def begin(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, sampled: np.ndarray) -> None:
        """The next forward computes ``counts`` tokens of each slot; arguments as in the perturber, (B,) each."""
        ends = np.cumsum(counts)
        positions = np.repeat(starts - ends + counts, counts) + np.arange(ends[-1])
        drawn, places, shared = np.zeros(len(positions), dtype=bool), np.full(len(positions), -1), []
        drawn[ends - 1] = sampled
        if self._blocks:
            prompts = self._store.prompts[slots]
            for row in (starts < prompts).nonzero()[0]:
                slot, first, last = int(slots[row]), int(ends[row] - counts[row]), int(ends[row])
                places[first:last] = self._places(slot, positions[first:last])
                found = np.arange(self._scheduled[slot], starts[row])
                if len(found):
                    shared.append((slot, found, self._places(slot, found)))
            self._scheduled[slots] = np.maximum(self._scheduled[slots], starts + counts)
            # Blocks of generated tokens are their trajectory's own: only prompts are shared.
            places[positions >= np.repeat(prompts, counts)] = -1
        self._layout = np.repeat(slots, counts), positions, drawn, places, shared

    def take(self, download: Callable[[Tensor], Tensor]) -> RoutedStep:
        """The experts of the forward that :meth:`begin` announced."""
        count = len(self._layout[0])
        return RoutedStep(download(self._step[:count].flatten(1).clone()), *self._layout)

    def write(self, step: RoutedStep) -> None:
        """Keeps a step's experts, which have arrived; a token computed again keeps the experts of its draw."""
        experts = step.experts.numpy()
        experts = experts if experts.dtype == np.uint8 else experts.view(np.uint16)
        prompt = step.places >= 0
        if prompt.any():
            self._in_cache(experts)[step.places[prompt]] = experts[prompt]
        for slot, positions, places in step.shared:
            self._rows.write(np.full_like(positions, slot), positions, {"experts": self._in_cache(experts)[places]})
        kept = (step.positions >= self._rows.counts[step.slots]) | step.drawn
        self._rows.write(step.slots[kept], step.positions[kept], {"experts": experts[kept]})

    def _in_cache(self, like: np.ndarray) -> np.ndarray:
        """Memory is committed where prompts have been."""
        if self._cache is None:
            config = self._runner.kv_cache_config
            size = config.kv_cache_groups[self._group()].kv_cache_spec.block_size
            self._cache = np.zeros((config.num_blocks * size, like.shape[1]), dtype=like.dtype)
        return self._cache

    def read(self, slot: int) -> np.ndarray:
        """The experts of a slot's first P tokens, (P, L, K) uint8 or uint16."""
        experts = self._rows.read(slot).get("experts", np.zeros((0, 1), dtype=np.uint8))
        return experts.reshape(len(experts), *self._shape)


def _layers(model: nn.Module) -> list[MoERunner]:
    """The layers of experts, in the model's order."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    return [module for module in model.modules() if isinstance(module, MoERunner)]


def _watch(layer: MoERunner, take: Callable[[Tensor], None]) -> None:
    """Has a layer hand over the experts that it chose, (rows, K), in each forward; UsageError where it cannot."""
    if not layer.is_monolithic:
        layer.router.set_capture_fn(take)
        return
    kernel = getattr(getattr(layer._quant_method, "moe_kernel", None), "fused_experts", None)
    if getattr(kernel, "supports_routing_replay_capture", bool)() and hasattr(kernel, "set_capture_fn"):  # not in 0.32
        kernel.set_capture_fn(take)
        return
    select = getattr(type(kernel), "_select_experts", None)  # of the CPU kernels of vLLM 0.28 and 0.29
    if kernel is None or select is None:
        inside = type(layer._quant_method if kernel is None else kernel).__name__
        why = f"vLLM's {inside} chooses experts inside and does not show them in this release"
        raise UsageError(f"routed experts: {why}. Leave --replay.routing out, or choose another MoE backend of vLLM.")

    def chosen(*args: object, **kwargs: object) -> Any:
        weights, ids = select(kernel, *args, **kwargs)
        take(ids)
        return weights, ids

    kernel._select_experts = chosen
