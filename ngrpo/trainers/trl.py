# SPDX-License-Identifier: Apache-2.0
"""Perturbed rollouts in TRL: `GRPOTrainer` 1.16 with colocated vLLM; its log-probabilities replay the records.

    from ngrpo.trainers.trl import PerturbedGRPOTrainer

    trainer = PerturbedGRPOTrainer(model, rewards, args=GRPOConfig(use_vllm=True, ...), train_dataset=prompts,
                                   perturbation={"name": "neighbor", "rate": 0.1})

Needs ``pip install --no-deps trl==1.16.0``; docs/integrations.md says what is and is not covered.
"""

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from ngrpo.config import compatibility
from ngrpo.config.feature_kinds import Combination
from ngrpo.machine.models import lora
from ngrpo.machine.upstream.versions import installed
from ngrpo.rollout import records, settings
from ngrpo.trainers.common.sample_records import check_lengths
from ngrpo.trainers.common.weights_file import reload_weights
from ngrpo.trainers.trl_head import corrected_head
from perturbations import FinishedTrajectory, UsageError, registry, replaying, seeds
from perturbations.parameters import freeze
from perturbations.replay.routing import RoutingScope

_ROWS = "perturbation_record"


class PerturbedGRPOTrainer(GRPOTrainer):
    """TRL's trainer: training rollouts are perturbed, and forwards replay their inputs.

    ``perturbation_gap`` is the largest training–inference mismatch of the last rollout batch over all processes, in
    nats, NaN before its first forward. TRL's log has it as ``perturbation/gap_max``.

    Args:
        perturbation: a spec for :func:`perturbations.create`; ``{"name": "none"}`` for none.
        replay_routing: for a mixture of experts: forwards take the experts that the rollouts chose.
        correct_mask: under ``top_p``, ``top_k`` or ``min_p``: log-probabilities are over the tokens that these left.
        vllm_options: keyword arguments of the colocated ``vllm.LLM``, such as ``enforce_eager``, in place of TRL's own.

    Raises:
        UsageError: for settings under which a rollout would not be replayed, such as a vLLM server or tools, and for
            adapters that vLLM's merged weights do not stand for.
    """

    def __init__(
        self,
        *args: object,
        perturbation: Mapping[str, Any],
        replay_routing: bool = False,
        correct_mask: bool = False,
        vllm_options: Mapping[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        _check_release()
        self._perturbation = registry.create(**settings.named("perturbation", perturbation))
        arguments = inspect.signature(GRPOTrainer).bind(*args, **kwargs).arguments
        config = arguments.get("args")
        combination = Combination(
            parts={"perturbation": self._perturbation},
            settings=config,
            arguments={**arguments, "correct_mask": correct_mask},
        )
        compatibility.check(compatibility.TRL, combination)
        # Of the last rollouts of training (True) and of evaluation (False): TRL keeps training batches meanwhile.
        self._rollouts: dict[bool, list[FinishedTrajectory]] = {True: [], False: []}
        # Which of these the next forward is of; None for all, in their order.
        self._rows_of_forward: list[int] | None = None
        # The batch of the loss that is computed, if its weights are those that drew it.
        self._on_policy_batch: dict[str, Any] | None = None
        self._replay_routing = replay_routing
        self._correct_mask = correct_mask
        of_engine = {
            settings.KEY: {**self._perturbation.spec(), "seed": _seed_of_process(self._perturbation.seed, config)},
            # Without a perturbation too, records are taken, and each token is drawn as the other arms draw theirs.
            settings.SEEDED_DRAWS: True,
            settings.ROUTED_EXPERTS: replay_routing,
            settings.SAMPLING_MASKS: correct_mask,
        }
        with _perturbed_engine(_with_additional_config(vllm_options or {}, of_engine)):
            super().__init__(*args, **kwargs)
        model = self.accelerator.unwrap_model(self.model)
        if is_peft_model(model):
            lora.check_merged_in_place(model, perturbed=self._perturbation.active)
        freeze(model, self._perturbation)

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: object, **kwargs: object) -> Any:
        generation = self.vllm_generation
        trains = self.model.training
        arguments = {
            "enabled": trains or self._perturbation.perturb_eval,
            # A round for the training and one for the evaluation of each step.
            "round": 2 * self.state.global_step + (0 if trains else 1),
        }
        kwargs_of_user = generation.generation_kwargs
        given = kwargs_of_user.get("extra_args") or {}
        # A new dictionary, since the user's own may go to another trainer too.
        generation.generation_kwargs = {**kwargs_of_user, "extra_args": {**given, settings.KEY: arguments}}
        records.take_finished(generation.llm)  # of what a callback or a reward generated meanwhile
        try:
            result = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        finally:
            generation.generation_kwargs = kwargs_of_user
        by_name = records.take_finished(generation.llm)
        # vLLM counts its requests, and returns them in their order.
        rollouts = [by_name[name] for name in sorted(by_name, key=int)]
        self._rollouts[trains] = rollouts
        if len(rollouts) != len(prompt_ids):
            raise RuntimeError(f"{len(rollouts)} records of {len(prompt_ids)} rollouts were handed over.")
        completion_ids = result[0]
        for rollout, prompt, completion in zip(rollouts, prompt_ids, completion_ids, strict=True):
            check_lengths(rollout.record, len(prompt), len(completion), "a rollout of TRL's")
        return result

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._rows_of_forward = None  # the next forwards are of all rollouts, in their order
        output = super()._generate_and_score_completions(inputs)
        # TRL shuffles and splits it with the batch.
        output[_ROWS] = torch.arange(len(output["completion_ids"]), device=output["completion_ids"].device)
        self.perturbation_gap = float("nan")
        if "old_per_token_logps" in output:
            self._note_gap(output["old_per_token_logps"], output)
        return output

    def _note_gap(self, log_probs: Tensor, batch: Mapping[str, Any]) -> None:
        """Notes the largest mismatch of a batch, over all processes, which all call this.

        ``log_probs``: log π of the completions by the weights that drew them, (B, C).
        """
        if "sampling_per_token_logps" not in batch:
            return
        of_engine = batch["sampling_per_token_logps"]
        compared = batch["completion_mask"].bool() & ~of_engine.isnan()  # vLLM gives none of some tokens
        gaps = (log_probs - of_engine)[compared].abs()
        # A process has no gap where all of its responses were cut off and are masked for it.
        largest = gaps.max() if len(gaps) else log_probs.new_tensor(-torch.inf)
        gap = self.accelerator.gather(largest).max().item()
        if gap == -math.inf:
            return
        self.perturbation_gap = gap if math.isnan(self.perturbation_gap) else max(gap, self.perturbation_gap)
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["perturbation/gap_max"].append(gap)

    def training_step(self, *args: object, **kwargs: object) -> Tensor:
        """As transformers'; routers replay until its end, since checkpointed layers are computed again in backward."""
        with ExitStack() as self._until_backward:
            return super().training_step(*args, **kwargs)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        self._rows_of_forward = inputs[_ROWS].tolist()
        # Without old log-probabilities, TRL trains with the weights that drew the batch.
        self._on_policy_batch = None if "old_per_token_logps" in inputs else inputs
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._on_policy_batch = None

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As TRL's: log π of the completions, (B, C), of the replayed history."""
        rows = range(len(input_ids)) if self._rows_of_forward is None else self._rows_of_forward
        rollouts = iter([self._rollouts[self.model.training][row] for row in rows])
        replayed = self.accelerator.unwrap_model(model)
        routing = RoutingScope(replayed) if self._replay_routing else None

        def forward(**inputs: Any) -> Any:
            """The model's forward of the next rows: TRL splits the batch, with its pictures, into these."""
            mask = inputs["attention_mask"]
            chunk = list(islice(rollouts, len(mask)))
            with ExitStack() as stack:
                if self._correct_mask:
                    stack.enter_context(corrected_head(chunk, mask, logits_to_keep))
                recorded = [rollout.record for rollout in chunk]
                stack.enter_context(replaying(replayed, recorded, mask, self._perturbation))
                if routing is not None:
                    until = self._until_backward if torch.is_grad_enabled() else stack
                    until.enter_context(routing([rollout.experts for rollout in chunk], mask))
                return model(**inputs)

        log_probs, *rest = super()._get_per_token_logps_and_entropies(
            forward, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )
        if self._on_policy_batch is not None:
            self._note_gap(log_probs.detach(), self._on_policy_batch)
        return (log_probs, *rest)


def _check_release() -> None:
    """Raises ``UsageError`` for another release of TRL than 1.16, whose private methods this file overrides."""
    release = installed("trl") or "none"
    if not release.startswith("1.16."):
        raise UsageError(f"TRL {release} is installed; supported: 1.16. Run: pip install --no-deps trl==1.16.0")


def _seed_of_process(perturbation_seed: int, config: GRPOConfig) -> int:
    """The perturbation's seed in the engine of this process; it depends on the run's seed and on the process.

    TRL spreads a prompt's group over the processes and gives its requests no seeds, so every engine numbers the
    responses to a prompt from 1 on. With one seed, two engines would draw the same responses.
    """
    seed_of_run = seeds.of_engine(perturbation_seed, config.seed)
    return seeds.of_engine(seed_of_run, config.process_index)


_SET_BY_TRL = {
    "model": "the trainer's first argument sets it",
    "tensor_parallel_size": "GRPOConfig(vllm_tensor_parallel_size=…) sets it, and must be 1",
    "enable_sleep_mode": "GRPOConfig(vllm_enable_sleep_mode=…) sets it",
    "seed": "GRPOConfig(seed=…) sets it",
    "logprobs_mode": "TRL's importance weights need processed_logprobs, which it sets",
    "distributed_executor_backend": "the weight sync needs TRL's own",
}
"""Engine arguments that `vllm_options` may not have, and why."""


def _with_additional_config(options: Mapping[str, Any], of_engine: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's options with our entries in its ``additional_config``.

    Raises ``UsageError`` for entries that would be lost, and for options that TRL relies on.
    """
    for name, reason in _SET_BY_TRL.items():
        if name in options:
            raise UsageError(f"vllm_options[{name!r}]={options[name]!r}: leave it out; {reason}.")
    given = options.get("additional_config") or {}
    for name in (*of_engine, settings.SAMPLING_SCHEDULE):
        if name in given:
            raise UsageError(
                f"vllm_options['additional_config'][{name!r}]={given[name]!r}: PerturbedGRPOTrainer has the arguments"
                " perturbation, replay_routing and correct_mask, and no sampling schedules. Leave the entry out."
            )
    return {**options, "additional_config": {**given, **of_engine}}


@contextmanager
def _perturbed_engine(options: Mapping[str, Any]) -> Iterator[None]:
    """TRL builds its engine in this context as ours, with these arguments of ``vllm.LLM`` in place of its own."""
    generation = grpo_trainer.VLLMGeneration
    llm = vllm_generation.LLM
    grpo_trainer.VLLMGeneration = _PerturbedGeneration
    vllm_generation.LLM = lambda **of_trl: llm(**{**of_trl, **options})
    try:
        yield
    finally:
        grpo_trainer.VLLMGeneration = generation
        vllm_generation.LLM = llm


class _PerturbedGeneration(vllm_generation.VLLMGeneration):
    """TRL's colocated engine, which refreshes the perturbation after a weight sync."""

    def sync_weights(self) -> None:
        worker = self.llm.llm_engine.model_executor.driver_worker
        if self.accelerator.device.type == "cpu":
            reload_weights(worker.model_runner, self._iter_named_params())
            self.llm.reset_prefix_cache()
        else:
            super().sync_weights()
        self.llm.collective_rpc("perturbation_prepare")
