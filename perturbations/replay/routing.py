# SPDX-License-Identifier: Apache-2.0
"""Routing replay: a mixture of experts sends each token to the experts that the rollout chose (R3, arXiv 2510.11370).

Engine and trainer round differently, so at a near tie their routers choose different experts. The replayed forward
takes the rollout's experts I and weighs them by its own router's scores s, for a softmax that renormalises

    y = Σ_{e ∈ I} g_e · E_e(x),    g_e = exp(s_e) / Σ_{j ∈ I} exp(s_j),

so the gradient reaches the router. Routers of transformers differ in what they make of the scores; they all choose by
`topk`. In a replay that `topk` returns the recorded experts and their scores, and the router's code stays its own:

    sample 0: experts (P_0, L, K) ─┐
    sample 1: none                 ├─► table (rows, L, K): a row for each token of the forward, -1 without a record
    sample 2: experts (P_2, L, K) ─┘     │
                                         │ its column of the router's layer, (rows, K)
                                         ▼
    hidden ─► router.forward ─► scores ─► topk ─► values, indices ─► the router's own softmax and scaling ─► experts
              (rows, D)         (rows,     │
                                experts)   ├─ a recorded row:  indices = table[row], values = scores[row, indices]
                                           └─ another row:     what torch.topk returns

A router that limits the choice to groups of experts first calls `topk` over the groups. There the groups of the
recorded experts get the score inf, so that the router does not close them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from perturbations.errors import UsageError
from perturbations.replay.flat_records import flat_rows

_TOPK = (torch.topk, torch.Tensor.topk)  # the function and the method


def routers(model: nn.Module) -> list[nn.Module]:
    """The routers of a model of transformers, in the order of its layers; ``UsageError`` where it has none."""
    all_routers = [module for module in model.modules() if "weight" in module._parameters and _is_router(module)]
    if not all_routers:
        raise UsageError(
            f"--replay.routing: {type(model).__name__} has no router with `top_k` and `num_experts`: it has no experts,"
            " or chooses them in a way that cannot be replayed. Leave the flag out."
        )
    return all_routers


def _is_router(module: nn.Module) -> bool:
    attributes = vars(module)
    return isinstance(attributes.get("top_k"), int) and isinstance(attributes.get("num_experts"), int)


class RecordedChoice(TorchFunctionMode):
    """Within one router's forward, `topk` over the experts returns the recorded ones where a row has them."""

    def __init__(self, recorded: Tensor, count: int) -> None:
        """``recorded``: (rows, K) int64, -1 in rows without; ``count``: the number of the layer's experts."""
        super().__init__()
        self._recorded = recorded
        self._count = count
        self.choices = 0  # calls of `topk` that returned recorded experts

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Torch calls this for each of its functions; only `topk` over experts, or over groups of them, is changed."""
        kwargs = kwargs or {}
        if func not in _TOPK:
            return func(*args, **kwargs)
        scores: Tensor = args[0]
        if scores.dim() != 2 or len(scores) != len(self._recorded):
            return func(*args, **kwargs)
        is_recorded = self._recorded >= 0  # (rows, K)
        if scores.shape[1] != self._count:
            group_scores = self._with_open_groups(scores, is_recorded)
            return func(group_scores, *args[1:], **kwargs)
        own_choice = func(*args, **kwargs)
        if own_choice.indices.shape != self._recorded.shape:
            return own_choice
        self.choices += 1
        indices = torch.where(is_recorded, self._recorded, own_choice.indices)
        values = scores.gather(1, indices)
        return torch.return_types.topk((values, indices))

    def _with_open_groups(self, scores: Tensor, is_recorded: Tensor) -> Tensor:
        """The scores of groups of experts, (rows, groups), with inf for the groups of the recorded experts."""
        experts_per_group = self._count // scores.shape[1]
        groups = self._recorded.clamp_min(0) // experts_per_group  # (rows, K)
        added = torch.where(is_recorded, torch.inf, 0.0).to(scores.dtype)
        return scores + torch.zeros_like(scores).scatter(1, groups, added)


class _Recorded(NamedTuple):
    """The recorded experts of a batch, concatenated: N positions in all."""

    sample: Tensor  # index in the batch, (N,) int64
    position: Tensor  # in the trajectory, (N,) int64
    experts: Tensor  # (N, L, K) int16
    attention_mask: Tensor  # of the batch, (B, T)


class RoutingScope:
    """Replays the experts of a batch in every forward of a model within ``with scope(...):``."""

    def __init__(self, model: nn.Module) -> None:
        """``model``: of transformers. ``UsageError`` for one without known routers."""
        self._routers = routers(model)
        self._layers = len(self._routers)
        self._experts_per_token: int = vars(self._routers[0])["top_k"]
        self._batch: _Recorded
        self._table: Tensor | None = None  # of the latest forward; None before the first one

    @contextmanager
    def __call__(self, experts: Sequence[np.ndarray | None], attention_mask: Tensor) -> Iterator[None]:
        """``experts``: of each sample's first P positions, (P, L, K) integers; None for a sample without.

        Later positions are routed by the model's own routers. ``attention_mask``: (B, T), 1 at real tokens, for padded
        batches (B, T) and packed ones (1, total). ``ValueError`` for other numbers of layers or of experts a token than
        the model's.
        """
        self._batch = self._joined(experts, attention_mask)
        self._table = None
        # An outer scope may have set a router's forward already, as an attribute of the object.
        forwards_before = [vars(router).get("forward") for router in self._routers]
        for layer, router in enumerate(self._routers):
            router.forward = partial(self._route, layer, router.forward)
        try:
            yield
            if self._table is None:
                raise RuntimeError(f"routing replay: no forward went through {type(self._routers[0]).__name__}.")
        finally:
            for router, forward_before in zip(self._routers, forwards_before):
                del router.forward
                if forward_before is not None:
                    router.forward = forward_before
            self._table = None

    def _joined(self, experts: Sequence[np.ndarray | None], attention_mask: Tensor) -> _Recorded:
        """The arrays of a batch, concatenated; ``ValueError`` for one of another model."""
        expected = (self._layers, self._experts_per_token)
        samples = [np.zeros(0, dtype=np.int64)]
        positions = [np.zeros(0, dtype=np.int64)]
        arrays = [np.zeros((0, *expected), dtype=np.int16)]
        for sample, array in enumerate(experts):
            if array is None:
                continue
            if array.shape[1:] != expected:
                raise ValueError(
                    f"routing replay: recorded are {array.shape[1]} layers with {array.shape[2]} experts a token,"
                    f" the model has {self._layers} with {self._experts_per_token}."
                )
            samples.append(np.full(len(array), sample, dtype=np.int64))
            positions.append(np.arange(len(array), dtype=np.int64))
            arrays.append(array.astype(np.int16))
        return _Recorded(
            sample=torch.from_numpy(np.concatenate(samples)),
            position=torch.from_numpy(np.concatenate(positions)),
            experts=torch.from_numpy(np.concatenate(arrays)),
            attention_mask=attention_mask,
        )

    def _route(self, layer: int, original: Callable[..., Any], hidden: Tensor, *args: object) -> Any:
        """The forward of a layer's router, with the recorded choice."""
        router = self._routers[layer]
        recorded = self._table_for(hidden)[:, layer].long()  # (rows, K)
        with RecordedChoice(recorded, vars(router)["num_experts"]) as choice:
            result = original(hidden, *args)
        if choice.choices != 1:
            raise UsageError(
                f"--replay.routing: {type(router).__name__} chooses its experts by topk {choice.choices} times, not"
                " once, so its choice cannot be replayed. Leave the flag out."
            )
        return result

    def _table_for(self, hidden: Tensor) -> Tensor:
        """The recorded experts of a forward's rows, (rows, L, K) int16, -1 where a row has none."""
        rows = hidden.shape[:-1].numel()
        if self._table is None or len(self._table) != rows:
            sample, position, experts, mask = (tensor.to(hidden.device) for tensor in self._batch)
            shape = tuple(mask.shape) if rows == mask.numel() else (1, rows)
            row_of_position, inside = flat_rows(sample, position, shape, mask)
            # Positions that were cut off are written to a last row, which is dropped.
            target = torch.where(inside, row_of_position, rows)
            table = experts.new_full((rows + 1, *experts.shape[1:]), -1)
            self._table = table.index_copy(0, target, experts)[:rows]
        return self._table
