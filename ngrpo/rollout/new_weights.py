# SPDX-License-Identifier: Apache-2.0
"""New weights in a vLLM worker: whatever way they arrive, everything computed from the old ones is computed again.

Every weight sync ends in ``model.load_weights``. OpenRLHF calls it for each parameter, so only calls that load all at
once (``reload_weights``, ``finish_weight_update``, the last call in `rollout_actor.py`) prepare the perturbation again.
A perturbation's own parameters come among the model's. A sleeping engine's weights are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ngrpo.machine.upstream.patch import around
from perturbations import parameters

if TYPE_CHECKING:
    from ngrpo.rollout.attach import AttachedPerturbation


def follow(runner: Any, attached: AttachedPerturbation) -> None:
    """Has a runner's ways of loading weights refresh what its perturbation computed of them."""
    model = runner.get_model()
    load, reload = _without_ours(model.load_weights, attached), runner.reload_weights
    model.load_weights = always_after(attached.embeddings.refresh, load)
    runner.reload_weights = always_after(attached.weights_changed, reload)


def _without_ours(original: Callable[..., Any], attached: AttachedPerturbation) -> Callable[..., Any]:
    """The perturbation's own parameters go to its module, and the others to the model."""

    def load_weights(weights: Iterable[tuple[str, Tensor]], *args: object, **kwargs: object) -> Any:
        own: dict[str, Tensor] = {}
        result = original(parameters.split(weights, own), *args, **kwargs)
        if not own:
            return result
        names = f"weight sync: {', '.join(own)}"
        if attached.module is None:
            name = attached.perturbation.name
            raise ValueError(f"{names} belong to a perturbation with parameters, but this engine runs {name!r}.")
        if any(bool(part.isnan().any()) for part in own.values()):
            # vLLM's sparse transfer puts NaN in the place of elements that it leaves out.
            raise ValueError(f"{names} hold NaN, as in vLLM's sparse transfer. Transfer these parameters whole.")
        parameters.load(attached.module, own, whole=False)
        return result

    return load_weights


def always_after(act: Callable[[], None], original: Callable[..., Any]) -> Callable[..., Any]:
    """After ``original``, also where it fails: some of the weights may have been replaced."""

    def load(*args: object, **kwargs: object) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            act()

    return load


def _then(act: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """After a worker's method, its perturbation, if it has one, acts, given the same arguments."""

    @around
    def method(original: Callable[..., Any], self: Any, *args: object, **kwargs: object) -> Any:
        result = original(self, *args, **kwargs)
        attached = getattr(self, "perturbation", None)
        if attached is not None:
            act(attached, *args, **kwargs)
        return result

    return method


# Weight transfer of the sparse and sharded kinds writes parameters directly, past ``load_weights``.
after_update = _then(lambda attached: attached.weights_changed())
# A worker for CPUs has its own of these two, which do nothing.
after_sleep = _then(lambda attached, *_, **__: setattr(attached, "asleep", True))
after_wake_up = _then(lambda attached, tags=None: attached.wake(tags))
