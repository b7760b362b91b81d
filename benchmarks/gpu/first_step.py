# SPDX-License-Identifier: Apache-2.0
"""The first optimizer steps of ``ngrpo train`` without vLLM: OpenRLHF's actor and strategy, DeepSpeed, replay.

The process is set up as a worker of a training is: its environment, its patches, and its flags with the hardware's.
"""

from __future__ import annotations

import math
import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Result = TypeVar("Result")

_CANDIDATES = 3  # of each made-up perturbed input, as `neighbor` leaves them
_RATE = 0.5  # the share of inputs that are perturbed
# How far a repeated update may be from the first one, as a share of it. Adam's states of another update give 0.12 on a
# CPU, where a right repetition gives 0. A GPU may sum in another order; 0.01 is an estimate of what that gives.
_LARGEST_REPETITION = 0.05


def words(arguments: dict[str, Any], model: str) -> list[str]:
    """Of ``ngrpo train``. OpenRLHF's parser demands a dataset and a reward, which nothing here opens."""
    samples = len(arguments["lengths"])
    options = {
        "--hardware": arguments["hardware"],
        "--perturbation": "neighbor",
        "--perturbation.rate": _RATE,
        "--model": model,
        "--data.prompt_dataset": "none",
        "--reward.remote_url": "none",
        "--algo.advantage.estimator": "reinforce",
        "--algo.kl.init_coef": 0,
        "--rollout.batch_size": samples,
        "--rollout.n_samples_per_prompt": 1,
        "--train.batch_size": samples,
        # Two micro-batches for each update, so that gradients accumulate.
        "--train.micro_batch_size": samples // 2,
        # Large, so that an update is seen in weights of bfloat16.
        "--actor.adam.lr": 1e-3,
        "--actor.lr_scheduler": "constant",
        "--actor.lr_warmup_ratio": 0,
    }
    # "false" keeps the plan of a small GPU from adding the offload.
    offload = ["--ds.adam_offload"] if arguments["offload"] else ["--ds.adam_offload", "false"]
    argv = []
    for name, value in options.items():
        argv += [name, str(value)]
    return [*argv, *offload, *arguments.get("flags", ())]


def measure(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for the start, for each of two updates, for a checkpoint saved between them and loaded after them.

    The last row is of the second update again, from the loaded checkpoint.
    """
    from benchmarks.gpu import models

    args = _as_in_a_worker(words(arguments, models.made(arguments["model"])))
    trainer, cost = _measured(lambda: _Trainer(args, arguments["lengths"]))
    kind = {"model": arguments["model"], "offload": arguments["offload"], "adam": trainer.adam}
    yield {**kind, "part": "start", **cost}
    begun = trainer.weights()
    update, cost = _measured(trainer.update)
    first = trainer.weights()
    yield {**kind, "part": "update 1", **cost, **update, "moved": _share_moved(begun, first)}
    with tempfile.TemporaryDirectory() as folder:
        _, cost = _measured(lambda: trainer.save(folder))
        yield {**kind, "part": "checkpoint saved", **cost, "checkpoint_gib": _size(folder) / 2**30}
        update, cost = _measured(trainer.update)
        second = trainer.weights()
        yield {**kind, "part": "update 2", **cost, **update, "moved": _share_moved(first, second)}
        _, cost = _measured(lambda: trainer.load(folder))
        yield {**kind, "part": "checkpoint loaded", **cost, "not_restored": _share_moved(first, trainer.weights())}
    update, cost = _measured(trainer.update)
    again = trainer.weights()
    repetition = _distance(second, again) / max(_distance(first, second), 1e-30)
    figures = {"moved": _share_moved(first, again), "repetition": repetition}
    yield {**kind, "part": "update 2 again", **cost, **update, **figures}


def judge(rows: list[dict[str, Any]]) -> tuple[bool, str]:
    """Finite gradients, replayed inputs, weights that move, and a checkpoint from which an update repeats."""
    wrong = []
    updates = [row for row in rows if "gradient_norm" in row]
    for row in updates:
        if not (math.isfinite(row["gradient_norm"]) and row["gradient_norm"] > 0):
            wrong.append(f"gradient norm {row['gradient_norm']} in {row['part']}")
        if not row["moved"] > 0:
            wrong.append(f"no weight moved in {row['part']}")
        if not row["shift"] > 0:
            wrong.append(f"nothing was replayed in {row['part']}")
        if not row.get("repetition", 0.0) <= _LARGEST_REPETITION:
            wrong.append(f"{row['part']} is {row['repetition']:.2g} of a step off")
    by_part = {row["part"]: row for row in rows}
    saved = by_part["checkpoint saved"]
    not_restored = by_part["checkpoint loaded"]["not_restored"]
    if not_restored > 0:
        wrong.append(f"{not_restored:.2%} of the loaded weights are not the saved ones")
    peaks = [row["device_gib"] for row in rows if row["device_gib"] is not None]
    peak = f"{max(peaks):.1f} GiB of the device" if peaks else f"{rows[-1]['host_gib']:.1f} GiB of the host"
    norms = ", ".join(f"{row['gradient_norm']:.3g}" for row in updates)
    verdict = f"NOT TRAINED: {'; '.join(wrong)}" if wrong else "trained"
    return not wrong, (
        f"{verdict}; {rows[0]['adam']}, gradient norms {norms}, an update {by_part['update 2']['milliseconds']:.0f} ms,"
        f" {peak}, checkpoint {saved['checkpoint_gib']:.2g} GiB saved in {saved['milliseconds'] / 1000:.1f} s"
    )


def _as_in_a_worker(command_line: list[str]) -> Any:
    """Prepares this process as Ray's worker of a training is prepared, and returns OpenRLHF's arguments."""
    from ngrpo.config import complete_run, parse
    from ngrpo.machine.upstream.openrlhf_flags import Flags, parsed
    from ngrpo.trainers.openrlhf import launch

    run = parse.run_config(command_line)
    flags = Flags(run.openrlhf).without_false()
    run = complete_run.CompleteRun(run=run, flags=flags).on_machine().to_run()
    os.environ.update(launch.worker_env(run.profile))
    launch.setup_hook(run.training_conditions, run)()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    return parsed(run.openrlhf)["args"]


@dataclass(frozen=True)
class _MicroBatch:
    """Made-up responses with their records, padded on the right: B samples of up to T tokens.

    ``action_mask`` and ``advantages`` are of the tokens after the first one, (B, T - 1), as OpenRLHF has them.
    """

    sequences: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    advantages: Tensor
    side_inputs: list[dict[str, bytes]]


class _Trainer:
    """OpenRLHF's actor under its strategy, and one batch.

    `PolicyModelActor` and `ActorPPOTrainer` do the same in openrlhf/trainer/ray/ppo_actor.py, which is not importable
    without vLLM.
    """

    def __init__(self, args: Any, lengths: list[int]) -> None:
        import torch
        from openrlhf.models import Actor, PolicyLoss
        from openrlhf.utils import get_strategy

        self._strategy = get_strategy(args)
        self._strategy.setup_distributed()
        actor = Actor(
            args.actor.model_name_or_path,
            attn_implementation=args.ds.attn_implementation,
            param_dtype=args.ds.param_dtype,
            ds_config=self._strategy.get_ds_train_config(),
            packing_samples=args.ds.packing_samples,
            temperature=args.rollout.temperature,
        )
        vocabulary = actor.model.config.vocab_size
        if args.actor.gradient_checkpointing_enable:
            reentrant = args.actor.gradient_checkpointing_reentrant
            actor.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        plan = {
            "optim": args.actor.optim,
            "muon": vars(args.actor.muon),
            "adam": vars(args.actor.adam),
            "lr_scheduler": args.actor.lr_scheduler,
            "lr_warmup_ratio": args.actor.lr_warmup_ratio,
            "min_lr_ratio": args.actor.min_lr_ratio,
            "max_norm": args.actor.max_norm,
            "scheduler_steps": 2,
        }
        self._actor, self._optimizer, self._scheduler = self._strategy.prepare((actor, plan))
        self._sleeps = args.ds.enable_sleep
        self._sleep()
        self._loss = PolicyLoss(*args.actor.eps_clip_low_high)
        device = torch.cuda.current_device()
        size = args.train.micro_batch_size
        self._batch = [
            _micro_batch(lengths[start : start + size], vocabulary, seed=start, device=device)
            for start in range(0, len(lengths), size)
        ]

    @property
    def adam(self) -> str:
        """The optimizer that DeepSpeed has chosen."""
        return type(self._optimizer.optimizer).__name__

    def update(self) -> dict[str, float]:
        """One update on the batch, after its old log-probabilities: loss, gradient norm, shift of the inputs."""
        from openrlhf.utils.loss_utils import iter_grad_accum_global_norm

        old = {id(micro): self._old_log_probs(micro) for micro in self._batch}
        self._wake()
        self._actor.train()
        losses, shifts = [], []
        micro_batches = iter_grad_accum_global_norm(
            self._batch, self._strategy, self._strategy.accumulated_gradient, lambda micro: micro.action_mask
        )
        for micro, loss_batch_info in micro_batches:
            with self._replayed(micro) as (stats, _):
                log_probs = self._log_probs(micro)
                loss, *_ = self._loss(
                    log_probs, old[id(micro)], micro.advantages, action_mask=micro.action_mask, **loss_batch_info
                )
                # Inside, so that a checkpointed layer replays too when it is computed again.
                self._strategy.backward(loss, self._actor, self._optimizer)
            self._strategy.optimizer_step(self._optimizer, self._actor, self._scheduler)
            losses.append(loss.item())
            shifts.append(stats.mean_shift())
        norm = self._strategy.get_grad_norm(self._actor)
        self._sleep()
        return {
            "loss": sum(losses) / len(losses),
            "gradient_norm": norm,
            "shift": sum(shifts) / len(shifts),
        }

    def save(self, folder: str) -> None:
        """Saves a checkpoint, while the states sleep where the run has them sleep."""
        self._strategy.save_ckpt(self._actor.model, folder, "first")

    def load(self, folder: str) -> None:
        """Loads the checkpoint of :meth:`save`."""
        self._wake()
        path, _ = self._strategy.load_ckpt(self._actor.model, folder)
        if path is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {folder}, where it had saved one")
        self._sleep()

    def weights(self) -> dict[str, Tensor]:
        """Copies of the weights in the host's memory."""
        named = self._actor.model.module.named_parameters()
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in named}

    def _sleep(self) -> None:
        """Moves DeepSpeed's states to the host where the run has ``--ds.enable_sleep``, as the default on GPUs has."""
        from openrlhf.utils.deepspeed.deepspeed_utils import offload_deepspeed_states

        if self._sleeps:
            offload_deepspeed_states(self._actor.model)

    def _wake(self) -> None:
        """Moves DeepSpeed's states back."""
        from openrlhf.utils.deepspeed.deepspeed_utils import reload_deepspeed_states

        if self._sleeps:
            reload_deepspeed_states(self._actor.model)

    def _replayed(self, micro: _MicroBatch) -> Any:
        from ngrpo.trainers.openrlhf import model_actors

        return model_actors.replayed(self._actor, micro.side_inputs, micro.attention_mask)

    def _log_probs(self, micro: _MicroBatch) -> Tensor:
        return self._actor(micro.sequences, micro.action_mask, attention_mask=micro.attention_mask)

    def _old_log_probs(self, micro: _MicroBatch) -> Tensor:
        import torch

        self._actor.eval()
        with torch.no_grad(), self._replayed(micro):
            return self._log_probs(micro)


def _micro_batch(lengths: list[int], vocabulary: int, *, seed: int, device: Any) -> _MicroBatch:
    """Random tokens, of which the first third is the prompt, with advantages of 1 and -1 in turn."""
    import numpy as np
    import torch

    from benchmarks.replay import RecordKind, random_record
    from perturbations.replay.trajectory import FinishedTrajectory

    draws = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(lengths).unsqueeze(-1)
    positions = torch.arange(max(lengths))
    attention_mask = (positions < sizes).long()
    sequences = torch.randint(2, vocabulary, attention_mask.shape, generator=draws) * attention_mask
    action_mask = ((positions >= sizes // 3) & (positions < sizes))[:, 1:].long()
    signs = torch.tensor([1.0, -1.0]).repeat(len(lengths))[: len(lengths)].unsqueeze(-1)
    kind = RecordKind(rate=_RATE, candidates=_CANDIDATES, noisy=False)
    side_inputs = []
    for index, length in enumerate(lengths):
        record = random_record(length, kind, vocabulary, seed + index)
        trajectory = FinishedTrajectory(record, np.zeros(length, np.float32))
        side_inputs.append(trajectory.pack())
    return _MicroBatch(
        sequences=sequences.to(device),
        attention_mask=attention_mask.to(device),
        action_mask=action_mask.to(device),
        advantages=(signs * action_mask).to(device),
        side_inputs=side_inputs,
    )


def _measured(work: Callable[[], Result]) -> tuple[Result, dict[str, float | None]]:
    """What ``work`` returns, and its cost.

    The cost: milliseconds, the peak of the device's memory in this work, and the peak of the process until its end.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    result = work()
    if on_gpu:
        torch.cuda.synchronize()
    return result, {
        "milliseconds": (time.perf_counter() - began) * 1000,
        "device_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,  # Linux counts KiB
    }


def _share_moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """The share of weights that are not equal."""
    changed = sum(int((after[name] != weight).sum()) for name, weight in before.items())
    return changed / sum(weight.numel() for weight in before.values())


def _distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The sum of the weights' absolute differences."""
    total = 0.0
    for name, weight in one.items():
        difference = other[name].float() - weight.float()
        total += float(difference.abs().sum())
    return total


def _size(folder: str) -> int:
    """The bytes of the files of a folder."""
    return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
