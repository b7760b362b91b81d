# SPDX-License-Identifier: Apache-2.0
"""New weights in a vLLM worker: whatever way they come, what was computed from the old ones is computed anew.

- ``model.load_weights`` is the end of every weight sync. OpenRLHF calls it for each parameter, so that only what loads
  all of them at once (``reload_weights``, ``finish_weight_update``, and OpenRLHF's own last call, see
  `ngrpo/trainers/openrlhf/rollout_actor.py`) prepares the perturbation again. A perturbation's own parameters come
  among the model's, and go to its module.
- While the engine sleeps, nothing may read its weights.

:func:`follow` is of one engine; ``after_update``, ``after_sleep`` and ``after_wake_up`` wrap methods of vLLM's
``Worker`` (`plugin.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from perturbations import parameters

if TYPE_CHECKING:
    from ngrpo.rollout.attach import AttachedPerturbation


def follow(runner: Any, attached: AttachedPerturbation) -> None:
    """Has a runner's ways of loading weights refresh what its perturbation computed of them."""
    model = runner.get_model()
    load, reload = _without_ours(model.load_weights, attached), runner.reload_weights
    model.load_weights = always_after(lambda: attached.perturber.weights_changed(), load)
    runner.reload_weights = always_after(attached.weights_changed, reload)


def _without_ours(original: Callable[..., Any], attached: AttachedPerturbation) -> Callable[..., Any]:
    """The perturbation's own parameters go to its module, and the others to the model."""

    def load_weights(weights: Iterable[tuple[str, Tensor]], *args: object, **kwargs: object) -> Any:
        own: dict[str, Tensor] = {}
        result = original(parameters.split(weights, own), *args, **kwargs)
        if own and attached.module is None:
            raise ValueError(
                f"weight sync: {', '.join(own)} belong to a perturbation with parameters, but this engine runs"
                f" {attached.perturbation.name!r}."
            )
        if any(bool(part.isnan().any()) for part in own.values()):
            raise ValueError(
                f"weight sync: {', '.join(own)} hold NaN, which stands for elements that vLLM's sparse transfer"
                " leaves out. Transfer these parameters whole."
            )
        if own and attached.module is not None:
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


def _then(act: Callable[[AttachedPerturbation], object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """After a worker's method, what its perturbation has to do, where it has one."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: object, **kwargs: object) -> Any:
            result = original(self, *args, **kwargs)
            attached = getattr(self, "perturbation", None)
            if attached is not None:
                act(attached)
            return result

        return method

    return make


def after_wake_up(original: Callable[..., None]) -> Callable[..., None]:
    """An engine may wake in parts; without tags all of it does."""

    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        original(self, tags)
        attached = getattr(self, "perturbation", None)
        if attached is not None and (tags is None or "weights" in tags):
            attached.weights_back()

    return wake_up


# Weight transfer of the sparse and sharded kinds writes parameters in place, past ``load_weights``.
after_update = _then(lambda attached: attached.weights_changed())
# (A worker for CPUs has its own of these two, which do nothing.)
after_sleep = _then(lambda attached: attached.weights_left())
