# SPDX-License-Identifier: Apache-2.0
"""What of verl is subclassed or relied upon, with the state of its source that this was written against: one table.

Nothing of verl is replaced; `check` compares before anything starts. ``python -m ngrpo.trainers.verl.verl_seams``
prints the states found.
"""

from __future__ import annotations

from ngrpo.trainers.openrlhf import seams
from ngrpo.trainers.openrlhf.seams import Seam

CHECKED = "verl 0.9.1"
_LOOP = "experimental.agent_loop"
_TRAINER, _SYNC, _LOOP_TQ = (f"trainer.ppo.v1.{name}" for name in ("trainer_base", "trainer_sync", "agent_loop_tq"))
_SERVER = "workers.rollout.vllm_rollout.vllm_async_server"
_ENGINE, _WORKERS = "workers.engine.fsdp.transformer_impl", "workers.engine_workers"


def _row(module: str, attribute: str, upstream: str, why: str) -> Seam:
    """A row; ``module`` without verl's name."""
    return Seam(f"verl.{module}", attribute, None, "verl", f"sha:{upstream}", CHECKED, why)


TRAINER = Seam(
    f"verl.{_SYNC}",
    "PPOTrainerSync",
    "ngrpo.trainers.verl.entry_point:registered",
    "verl",
    "sha:3a7430396064",
    CHECKED,
    "stays as it is; ours is registered beside it. No request runs while weights change",
)
# fmt: off
SEAMS: tuple[Seam, ...] = (
    _row(_TRAINER, "PPOTrainer._init_resource_pool_mgr", "493680a47259", "ours puts our workers in"),
    _row(_TRAINER, "PPOTrainer._compute_old_log_prob", "47e705af8fb4", "ours sends the spec along, and measures"),
    _row(_TRAINER, "PPOTrainer._compute_ref_log_prob", "647f0c685c99", "ours sends the spec along"),
    _row(_TRAINER, "PPOTrainer._update_actor", "61e4a008610f", "ours sends the spec along, and asks for the answer"),
    _row(_TRAINER, "PPOTrainer._step_once", "0555717c3378", "the order of these"),
    _row(_TRAINER, "register_trainer", "39c894aab481", "the trainer's mode"),
    TRAINER,
    _row("trainer.main_ppo", "TaskRunnerV1.init_agent_loop_manager", "db9691ea6fc9",
        "the manager's class is the configuration's"),
    _row("utils.transferqueue_utils", "_async_meta_to_realdata", "4e3fcdf17e9a",
        "workers get all fields and the extra_info"),
    _row("trainer.ppo.padding_utils", "construct_minimal_padding_template", "8da2149e76c4",
        "padding copies a sample's record"),
    _row("trainer.ppo.padding_utils", "upsample_batch_to_divisible_size", "712c98ce70fa",
        "and has a name that says so"),
    _row(_LOOP_TQ, "AgentLoopManagerTQ", "2c2014d24f19", "ours starts our workers"),
    _row(_LOOP_TQ, "AgentLoopWorkerTQ", "ae2ea55ee53a", "a sample has its answer's extra_fields"),
    _row(f"{_LOOP}.agent_loop", "AgentLoopWorker._run_agent_loop", "8a23de688a00",
        "ours says which trajectory is asked for"),
    _row(f"{_LOOP}.agent_loop", "AgentLoopOutput.as_dict", "a83678f37801", "hands extra_fields on"),
    _row(f"{_LOOP}.single_turn_agent_loop", "SingleTurnAgentLoop.run", "765c85c59168", "hands both on"),
    _row("workers.rollout.llm_server", "LLMServerClient.generate", "7b2e51213e60", "hands both on"),
    _row("workers.rollout.replica", "RolloutReplicaRegistry", "25b47c8795c6", "our replica takes vLLM's place"),
    _row("workers.rollout.replica", "TokenOutput", "066146a29165", "has extra_fields"),
    _row(_SERVER, "vLLMHttpServer.run_server", "e2bd34e512d9", "ours has the engine confirm its perturbation"),
    _row(_SERVER, "vLLMHttpServer.generate", "98d1b7a3a17b", "ours picks up the record"),
    _row(_SERVER, "vLLMHttpServer._get_worker_extension_cls", "3d69431647e9", "ours ends a weight sync"),
    _row(_SERVER, "vLLMReplica.__init__", "c1720aaf7610", "ours starts our server"),
    _row("workers.rollout.vllm_rollout.utils", "vLLMColocateWorkerExtension", "ee243df2600d",
        "ours ends a weight sync"),
    _row("workers.engine.base", "EngineRegistry", "54452eee1279", "a vendor's engine goes before the device's"),
    _row(_ENGINE, "FSDPEngineWithLMHead.prepare_model_inputs", "2652efd0aee1", "right-padded rows, or packed ones"),
    _row(_ENGINE, "FSDPEngineWithLMHead.prepare_model_outputs", "384ab09aab7b", "ours puts densities in"),
    _row(_ENGINE, "FSDPEngineWithLMHead.forward_step", "d2fa75d4cdf9", "ours replays"),
    _row(_ENGINE, "FSDPEngine._build_fsdp_module", "980b7d8b72c1", "on a CPU ours offloads nothing"),
    _row(_WORKERS, "ActorRolloutRefWorker.init_model", "61d59571adb3", "actor and reference are registered engines"),
    _row(_WORKERS, "TrainingWorker.infer_batch", "24e5308887fd", "hands all outputs on"),
    _row("workers.utils.losses", "ppo_loss", "d7a7f4ab82c8", "takes log_probs of the outputs"),
)
# fmt: on


def check() -> None:
    """Raises `SeamMismatch` where the installed verl is not the one that this was written against."""
    seams.check((), SEAMS, table="ngrpo/trainers/verl/verl_seams.py")


if __name__ == "__main__":
    for row in SEAMS:
        print("ok " if (state := seams.state_of(row)) == row.upstream else "NOT", row.target, state)
