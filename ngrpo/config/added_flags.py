# SPDX-License-Identifier: Apache-2.0
"""Why a run has flags of OpenRLHF that the user did not give: one sentence for each, which a dry run prints.

Each function is the `reason` of one layer of `complete_run.py`, and takes the name of an added flag and the run before
that layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ngrpo.config.kinds import run_level_kinds
from ngrpo.config.run import OVERLONG

if TYPE_CHECKING:
    from ngrpo.config.complete_run import CompleteRun

_FOLDER = {
    "--ckpt.output_dir": "the trained model goes into the run's folder",
    "--ckpt.path": "checkpoints go into the run's folder",
    "--logger.tensorboard_dir": "the metrics of each step go into the run's folder",
}
_HARDWARE = {
    "--vllm.num_engines": "one engine uses all cores",
    "--vllm.enforce_eager": "compiling takes longer than it saves on a CPU",
    "--vllm.enable_prefix_caching": "the responses of a group share their prompt",
    "--vllm.sync_backend": "NCCL, OpenRLHF's default, needs GPUs",
    "--ds.param_dtype": "rollout and trainer agree to 1e-4 in float32",
    "--ds.attn_implementation": "without flash-attn: PyTorch's own attention",
}
_PLACEMENT = {
    "--train.colocate_all": "trainer and engines take turns on the same GPUs",
    "--vllm.enable_sleep": "engines release GPU memory while the trainer works",
    "--ds.enable_sleep": "optimizer states wait on the host in rollouts",
    "--actor.gradient_checkpointing_enable": "saves memory: activations are computed again",
    "--ckpt.save_steps": "an interrupted run goes on from a checkpoint",
    "--vllm.num_engines": "engines on all GPUs of the placement",
    "--vllm.tensor_parallel_size": "the fewest GPUs for which an engine fits",
    "--vllm.gpu_memory_utilization": "the engines' share of a GPU, so that all fits",
    "--ds.zero_stage": "the lowest stage that fits into memory",
    "--ds.adam_offload": "the optimizer fits on the host only",
}
_TASK = {
    "--data.prompt_dataset": "its training prompts",
    "--data.input_key": "the column of its prompts",
    "--data.label_key": "the column of its references",
    "--data.apply_chat_template": "its prompts are chat messages",
    "--eval.dataset": "its held-out problems",
    "--reward.remote_url": "its reward",
}


def of_folder(flag: str, complete: CompleteRun) -> str:
    """The places of the run's outputs, and the settings of a packaged model."""
    return _FOLDER.get(flag, "a setting that comes with the packaged model")


def of_methods(flag: str, complete: CompleteRun) -> str:
    """The method that needs the flag."""
    for kind in run_level_kinds():
        method = complete.run.part(kind.name)
        if kind.name != "advantage" and hasattr(method, "flags") and flag in method.flags(complete.flags):
            return f"{kind.flag} {method.name} needs it"
    return "a method of this run needs it"


def of_preset(flag: str, complete: CompleteRun) -> str:
    """The advantage or the preset that has the flag."""
    run = complete.run
    if flag == "--reward.clip_range":
        return "advantages can be larger than OpenRLHF's bound of 10"
    if run.advantage is not None and flag in run.advantage.flags(complete.flags):
        return f"--advantage {run.advantage.name} needs it"
    if flag == OVERLONG:
        return f"--preset {run.preset}: a fifth of the longest response"
    return f"--preset {run.preset}"


def of_hardware(flag: str, complete: CompleteRun) -> str:
    """The hardware profile's reason."""
    if flag.endswith(".num_gpus_per_node"):
        return "one process here; OpenRLHF's default is 8"
    return _HARDWARE.get(flag, f"a default of the hardware profile {complete.run.profile.name}")


def of_placement(flag: str, complete: CompleteRun) -> str:
    """The reason of the plan for the run's GPUs."""
    if flag.endswith(".num_gpus_per_node"):
        return "the GPUs of a node in this placement"
    if flag.endswith(".num_nodes"):
        return "the nodes of this placement"
    return _PLACEMENT.get(flag, "the placement needs it")


def of_task(flag: str, complete: CompleteRun) -> str:
    """What of the task the flag names."""
    return f"--task {complete.run.task}: {_TASK.get(flag, 'a setting that comes with it')}"
