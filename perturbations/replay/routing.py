# SPDX-License-Identifier: Apache-2.0
"""Routing replay: a mixture of experts sends each token to the experts that the rollout chose (R3, arXiv 2510.11370).

Engine and trainer round differently, so at a near tie their routers choose different experts. The replayed forward
takes the rollout's experts I and weighs them by its own router's scores s, for a softmax that renormalises

    y = Σ_{e ∈ I} g_e · E_e(x),    g_e = exp(s_e) / Σ_{j ∈ I} exp(s_j),

so the gradient reaches the router. Routers of transformers differ in what they make of the scores; they all choose by
`topk`. In a replay that `topk` returns the recorded experts and their values, and the router's code stays its own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from perturbations.errors import UsageError
from perturbations.replay.scope import flat_rows

_TOPK = (torch.topk, torch.Tensor.topk)


def routers(model: nn.Module) -> list[nn.Module]:
    """The routers of a model of transformers, in the order of its layers; ``UsageError`` where it has none."""
    found = [module for module in model.modules() if "weight" in module._parameters and _is_router(module)]
    if not found:
        why = f"{type(model).__name__} has no router with `top_k` and `num_experts`: it has no experts, or chooses them"
        raise UsageError(f"--replay.routing: {why} in a way that cannot be replayed. Leave the flag out.")
    return found


def _is_router(module: nn.Module) -> bool:
    return all(isinstance(vars(module).get(name), int) for name in ("top_k", "num_experts"))


class RecordedChoice(TorchFunctionMode):
    """Within one router's forward, `topk` over the experts returns the recorded ones where a row has them."""

    def __init__(self, recorded: Tensor, count: int) -> None:
        """``recorded``: (rows, K) int64, -1 in rows without; ``count``: experts of the layer."""
        super().__init__()
        self._recorded, self._count, self.choices = recorded, count, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every function of torch passes here; all but `topk` over experts or their groups stay as they are."""
        kwargs = kwargs or {}
        if func not in _TOPK:
            return func(*args, **kwargs)
        scores: Tensor = args[0]
        if scores.dim() != 2 or len(scores) != len(self._recorded):
            return func(*args, **kwargs)
        known = self._recorded >= 0
        if scores.shape[1] != self._count:  # groups of experts: those of the recorded ones stay open
            group = self._recorded.clamp_min(0) // (self._count // scores.shape[1])
            open_ = torch.zeros_like(scores).scatter(1, group, torch.where(known, torch.inf, 0.0).to(scores.dtype))
            return func(scores + open_, *args[1:], **kwargs)
        own = func(*args, **kwargs)
        if own.indices.shape != self._recorded.shape:
            return own
        self.choices += 1
        indices = torch.where(known, self._recorded, own.indices)
        return torch.return_types.topk((scores.gather(1, indices), indices))


class RoutingScope:
    """Replays the experts of a batch in every forward of a model while it is called as a context."""

    def __init__(self, model: nn.Module) -> None:
        """``model``: of transformers. ``UsageError`` for one without known routers."""
        self._routers = routers(model)
        self._sizes = [(vars(router)["num_experts"], vars(router)["top_k"]) for router in self._routers]
        self._made: Tensor | None = None

    @contextmanager
    def __call__(self, experts: Sequence[np.ndarray | None], attention_mask: Tensor) -> Iterator[None]:
        """``experts``: of each sample's first P positions, (P, L, K) integers; tokens behind them route as they do.

        ``attention_mask``: (B, T), 1 at real tokens, for padded batches (B, T) and packed ones (1, total).
        ``ValueError`` for other numbers of layers or of experts a token than the model's.
        """
        present = [(i, each) for i, each in enumerate(experts) if each is not None]
        wanted = (len(self._routers), self._sizes[0][1])
        for _, each in present:
            if each.shape[1:] != wanted:
                given = f"{each.shape[1]} layers with {each.shape[2]} experts a token"
                raise ValueError(f"routing replay: recorded are {given}, the model has {wanted[0]} with {wanted[1]}.")
        sample = torch.cat([torch.zeros(0), *(torch.full((len(each),), i) for i, each in present)]).long()
        position = torch.cat([torch.zeros(0), *(torch.arange(len(each)) for _, each in present)]).long()
        parts = [np.zeros((0, *wanted), dtype=np.int16), *(each.astype(np.int16) for _, each in present)]
        self._batch = sample, position, torch.from_numpy(np.concatenate(parts)), attention_mask
        self._made = None
        before = [vars(router).get("forward") for router in self._routers]
        for layer, router in enumerate(self._routers):
            router.forward = partial(self._route, layer, router.forward)
        try:
            yield
            if self._made is None:
                raise RuntimeError(f"routing replay: no forward went through {type(self._routers[0]).__name__}.")
        finally:
            for router, own in zip(self._routers, before):
                del router.forward
                if own is not None:
                    router.forward = own
            self._made = None

    def _route(self, layer: int, original: Callable[..., Any], hidden: Tensor, *args: object) -> Any:
        recorded = self._table(hidden)[:, layer].long()
        with RecordedChoice(recorded, self._sizes[layer][0]) as choice:
            result = original(hidden, *args)
        if choice.choices != 1:
            how = f"{type(self._routers[layer]).__name__} chooses its experts by topk {choice.choices} times, not once"
            raise UsageError(f"--replay.routing: {how}, so its choice cannot be replayed. Leave the flag out.")
        return result

    def _table(self, hidden: Tensor) -> Tensor:
        """The recorded experts of a forward's rows, (rows, L, K) int16, -1 where a row has none."""
        rows = hidden.shape[:-1].numel()
        if self._made is None or len(self._made) != rows:
            sample, position, ids, mask = (part.to(hidden.device) for part in self._batch)
            shape = tuple(mask.shape) if rows == mask.numel() else (1, rows)
            at, inside = flat_rows(sample, position, shape, mask)
            table = ids.new_full((rows + 1, *ids.shape[1:]), -1)  # positions that were cut off go to the last row
            self._made = table.index_copy(0, torch.where(inside, at, rows), ids)[:rows]
        return self._made
