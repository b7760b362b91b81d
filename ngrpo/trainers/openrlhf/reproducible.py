# SPDX-License-Identifier: Apache-2.0
"""The same seed, the same rollouts from run to run: the rows of `patches.py` under ``--reproducible``.

Stock OpenRLHF 0.11.2 shuffles prompts and micro-batches by generators that its seed does not reach or that others have
used, sends requests to an engine that is already running, and trains on answers in the order in which they finish. The
last two follow the clock: the first requests run in smaller batches, which round otherwise. The tokens themselves are
drawn from counter-based streams, see `ngrpo.rollout.settings`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from perturbations import seeds
from perturbations.errors import present

if TYPE_CHECKING:
    from openrlhf.utils.deepspeed.deepspeed import DeepspeedStrategy
    from ray.actor import ActorHandle
    from transformers import PreTrainedTokenizerBase

    from ngrpo.trainers.openrlhf.objects import ActorTrainer

logger = logging.getLogger("ngrpo.trainers.openrlhf")

_POLL_SECONDS = 0.01
# An agent may do something else before it asks for tokens; it must not wait for a batch that never fills.
_PATIENCE_SECONDS = 10.0


def seeded_prompt_order(original: Callable[..., Any]) -> Callable[..., Any]:
    """`prepare_datasets`: the order of the prompts follows ``--train.seed``. A row of `patches.py`."""

    def prepare_datasets(strategy: DeepspeedStrategy, tokenizer: PreTrainedTokenizerBase) -> Any:
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(present(strategy.args, "strategy.args").train.seed)
            return original(strategy, tokenizer)

    return prepare_datasets


def seeded_training_order(original: Callable[..., Any]) -> Callable[..., Any]:
    """`ActorPPOTrainer.ppo_train`: how samples fall into micro-batches follows ``--train.seed`` and the step."""

    def ppo_train(self: ActorTrainer, *args: object, **kwargs: object) -> Any:
        import torch

        # DeepSpeed's count of updates is part of a checkpoint: a resumed run goes on with the same orders.
        torch.manual_seed(seeds.of_training_order(self.args.train.seed, self.actor.model.global_steps))
        return original(self, *args, **kwargs)

    return ppo_train


def whole_batches(plain: type) -> type:
    """`SamplesGenerator` whose engines start on a batch when it is complete, and whose answers keep its order.

    A row of `patches.py`. With dynamic filtering, which asks for further prompts one by one, nothing changes.
    """

    class WholeBatchSamplesGenerator(plain):  # type: ignore[misc, valid-type]
        def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[str], **kwargs: Any) -> Any:
            if self.args.algo.dynamic_filtering_enable:
                return super()._dispatch_prompts_to_vllm(prompts, labels, **kwargs)
            group = kwargs.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
            _call(self.vllm_engines, "pause_generation")
            try:
                answers = super()._dispatch_prompts_to_vllm(prompts, labels, **kwargs)
                _wait_for_requests(self.vllm_engines, len(prompts) * group)
            finally:
                _call(self.vllm_engines, "resume_generation")
            return _in_order(answers)

    return WholeBatchSamplesGenerator


def _wait_for_requests(engines: Sequence[ActorHandle], expected: int) -> None:
    until = time.monotonic() + _PATIENCE_SECONDS
    while (arrived := sum(_call(engines, "get_num_unfinished_requests"))) < expected:
        if time.monotonic() >= until:
            logger.warning(
                "reproducible: only %d of %d requests of this batch have reached the engines after %g seconds, so they"
                " start without the others. This step's rollouts may differ when the run is repeated. An agent that"
                " does other work before it asks for tokens has this effect.",
                arrived,
                expected,
                _PATIENCE_SECONDS,
            )
            return
        time.sleep(_POLL_SECONDS)


def _in_order(answers: list[Any]) -> list[Any]:
    """One reference to all answers in the order of their prompts; OpenRLHF reads several as they come."""
    import ray

    return [ray.put([answer for group in ray.get(answers) for answer in group])]


def _call(engines: Sequence[ActorHandle], method: str) -> list[Any]:
    import ray

    return ray.get([getattr(engine, method).remote() for engine in engines])
