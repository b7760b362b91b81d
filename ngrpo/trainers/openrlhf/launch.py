# SPDX-License-Identifier: Apache-2.0
"""The start of a run: OpenRLHF's own training program in this process, on the available Ray; and why it ended.

`openrlhf.cli.train_ppo_ray` runs as ``__main__`` with its own argument parser. The upstream patches are installed
before, in this process and in every Ray worker.
"""

import os
import re
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from ngrpo import patches
from ngrpo.config.run import RunConfig, begin
from ngrpo.machine.hardware import Profile, processes, stand_ins
from ngrpo.machine.progress import announce
from ngrpo.machine.upstream import placement
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError

_PROGRAM = "openrlhf.cli.train_ppo_ray"

# The variables that OpenRLHF 0.11.2 passes to its own ray.init (cli/train_ppo_ray.py), which the one below replaces.
_OPENRLHF_ENV = {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN", "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}

# Prefixes of the environment variables that the docs name. Every worker gets these variables with this process's
# values, except those of `_OF_A_NODE`, which differ by node.
_FORWARDED_PREFIXES = (
    "DS_",
    "FI_",
    "GLOO_",
    "HF_",
    "HUGGING_FACE_",
    "NCCL_",
    "NGRPO_",
    "TORCH_NCCL_",
    "TRANSFORMERS_",
    "UCX_",
    "VLLM_",
    "WANDB_",
)
_OF_A_NODE = (processes.OWNER, "VLLM_HOST_IP")
_PATH_FLAG_ENDINGS = ("path", "_url", "_dir", "dataset")  # the ends of OpenRLHF's flags that take paths

RUN_ID = "NGRPO_RUN_ID"
"""Environment variable that every process of a run inherits, so that those left over can be found."""

_GRACE_SECONDS = 5.0
_CHECKPOINT_ADVICE = (
    "is still there. Make room (--ckpt.max_num keeps fewer) and go on with --ckpt.load_enable. The writer said:"
)
# What an error's text means; the line that fits the pattern, or the last one, is appended.
_MEANING_OF_ERROR = {
    # The memory monitor of Ray 2.55.
    "Memory on the node": (
        "the machine ran out of memory, and Ray ended a process of this run. End other programs, or reduce"
        " --train.micro_batch_size, --rollout.batch_size, --rollout.max_new_tokens, vLLM's memory"
        " (--vllm.gpu_memory_utilization; on a CPU VLLM_CPU_KVCACHE_SPACE) or the model. Ray said:"
    ),
    # vLLM 0.29's own messages; the allocator's is of a sleeping engine that wakes up (csrc/cumem_allocator.cpp).
    r"Free memory on device": (
        "other processes hold memory of the GPU that an engine needs. End them (`nvidia-smi` lists them; `ray stop`"
        " ends those of an earlier run), or lower --vllm.gpu_memory_utilization. vLLM said:"
    ),
    r"No available memory for the cache blocks|larger than the available KV cache": (
        "an engine's share of the GPU leaves no room for one response. Raise --vllm.gpu_memory_utilization or"
        " --vllm.tensor_parallel_size, or lower --data.max_len. vLLM said:"
    ),
    r"CUDA Error: out of memory at .*cumem_allocator": (
        "an engine could not wake up, because the trainer had not left it its share of the GPU. Lower"
        " --vllm.gpu_memory_utilization, or add --ds.enable_sleep or --ds.adam_offload, which move the optimizer's"
        " states to the host. vLLM said:"
    ),
    # torch 2.13.
    r"CUDA out of memory": (
        "a GPU ran out of memory. Lower --train.micro_batch_size, --rollout.micro_batch_size, --data.max_len or, where"
        " engines share the GPU, --vllm.gpu_memory_utilization; or add --actor.gradient_checkpointing_enable,"
        " --ds.zero_stage 3 or --ds.adam_offload. The same command with --dry-run estimates what each part takes"
        " (docs/clusters.md). torch said:"
    ),
    # NCCL, and Python's multiprocessing. Docker gives a container 64 MB.
    r"/dev/shm|shared memory segment": (
        "the shared memory of this machine is used up. Start a container with --ipc host or --shm-size 16g, a pod with"
        " a memory volume at /dev/shm. The process said:"
    ),
    # Python's message on a node without this project, or with an older one.
    r"No module named '(ngrpo|perturbations)(\.\w+)*'": (
        "a node of the cluster is without ngrpo, or has another release of it. Install the same one on every node"
        " (docs/install.md). The node said:"
    ),
    # Python's messages at OpenRLHF's import, and transformers 5.15's for a missing attention.
    r"No module named 'flash_attn|flash_attn\S*\.so: |FlashAttention\d has been toggled on, but it cannot be used": (
        "a node of the cluster has no working flash-attn, unlike the machine where the run was started. Install the"
        " same one on every node (docs/install.md), or remove it where runs are started. The node said:"
    ),
    # torch 2.13 does not pass on the system's word if it cannot write a checkpoint.
    r"(?s)inline_container\.cc.*unexpected pos|PytorchStreamWriter failed": (
        "a checkpoint could not be written whole: no space is left on the device of --ckpt.path or --ckpt.output_dir."
        f" The one before {_CHECKPOINT_ADVICE}"
    ),
    r"No space left on device": (
        "a file could not be written: no space is left on its device. A run writes to --run-dir, --ckpt.path,"
        f" --ckpt.output_dir and --logger.tensorboard_dir. The last checkpoint {_CHECKPOINT_ADVICE}"
    ),
}


# What vLLM raises where its engine's own process failed, which logs the reason, and what happened.
_ENGINE_ERRORS = {
    "Engine core initialization failed": "an engine did not start",
    "EngineCore encountered an issue": "an engine failed",
}

# After a SIGKILL of the driver, Ray 2.55's agents look for its control store (GCS) for 60 seconds by default. A Ray on
# this machine ends with its driver, so there is nothing to look for.
_RAY_RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"


class TrainingFailed(RuntimeError):
    """OpenRLHF, or one of its Ray actors, ended with an error; the message names the root cause."""


def launch(run: RunConfig) -> None:
    """Trains until OpenRLHF's program ends; the run has complete flags, checked by ngrpo/config/rules.py.

    Raises:
        TrainingFailed: with the root cause, whatever process it happened in.
        UsageError: for a path that another node of the cluster lacks.
        SystemExit: from OpenRLHF's parser, which refused a flag or printed its help.
    """
    profile, flags = run.profile, Flags(run.openrlhf)
    conditions = run.training_conditions
    for name, value in profile.env.items():
        os.environ.setdefault(name, value)
    processes.add_programs_to_path()
    os.environ[RUN_ID] = uuid4().hex
    if not flags.has("--help"):
        handler = signal.getsignal(signal.SIGTERM)
        announce("starting Ray")
        _start_ray(profile, flags, conditions, run)
        signal.signal(signal.SIGTERM, handler)  # ray.init installs one that aborts the process
    begin(run)
    patches.install(conditions)
    print("ngrpo: starting OpenRLHF, its engines and its models", flush=True)
    announce("importing OpenRLHF")
    _run(flags.argv)


def worker_env(profile: Profile) -> dict[str, str]:
    """The environment of every Ray worker process; the user's own values win, except over the profile's forced ones."""
    defaults = {**_OPENRLHF_ENV, **profile.env}
    env = {name: os.environ.get(name, value) for name, value in defaults.items()}
    # The processes of a cluster that was joined do not have this process's environment.
    for name, value in os.environ.items():
        if name.startswith(_FORWARDED_PREFIXES) and name not in _OF_A_NODE:
            env[name] = value
    env |= profile.forced_env
    # The setup hook runs before Ray gives a worker the driver's sys.path; a checkout that is not
    # installed must be importable there too (Ray 2.55). On a cluster ngrpo must be installed.
    package_root = str(Path(__file__).resolve().parents[3])
    paths = [package_root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    return env


def _start_ray(profile: Profile, flags: Flags, conditions: Sequence[str], run: RunConfig) -> None:
    """Starts Ray here, or joins the available cluster, with the setup hook for every worker."""
    import ray
    from ray.exceptions import RayError

    everywhere = {"env_vars": worker_env(profile), "worker_process_setup_hook": setup_hook(conditions, run)}
    address = os.environ.get("RAY_ADDRESS") or placement.started_here()
    if address in (None, "local"):
        os.environ.pop("RAY_ADDRESS", None)  # an engine's core would inherit it and start another Ray
        os.environ.setdefault(_RAY_RECONNECT_VARIABLE, "10")
        ray.init(address="local", runtime_env=everywhere, **profile.ray_init(flags))
        return
    ray.init(address=address, runtime_env=everywhere)
    try:
        _check_paths(local_paths(flags, run.run_dir))
    except RayError as error:
        raise _as_training_failed(error) from None
    needed_gpus = sum(group.gpus for group in placement.groups(flags.args))
    cluster_gpus = int(ray.cluster_resources().get("GPU", 0))
    if cluster_gpus < needed_gpus and profile.name == "cpu":  # with CUDA a cluster may grow
        ray.shutdown()
        raise TrainingFailed(
            f"the Ray cluster at {address} has {cluster_gpus} GPUs, and this run places {needed_gpus} (without CUDA"
            f" they are only counted). Start it with `ray start --head --num-gpus {needed_gpus}`, or set"
            " RAY_ADDRESS=local for its own Ray."
        )


def _run(flags: Sequence[str]) -> None:
    argv, sys.argv = sys.argv, [_PROGRAM, *flags]
    finished = False
    try:
        runpy.run_module(_PROGRAM, run_name="__main__", alter_sys=True)
        finished = True
    except Exception as error:
        raise _as_training_failed(error) from None
    finally:
        sys.argv = argv
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()
        if not finished:
            end_processes(os.environ[RUN_ID])


def setup_hook(conditions: Sequence[str], run: RunConfig) -> Callable[[], None]:
    """Ray's `worker_process_setup_hook`, which runs in every worker before its tasks and actors.

    Ray keeps the function, and the run with it, in its own store, so no disk need be shared; an environment variable is
    limited to 131,072 bytes. Relative paths mean in a worker what they mean here.
    """
    working_folder = os.getcwd()

    def in_worker() -> None:
        # Imports take most of a start, and upstream logs nothing of them.
        announce("importing torch, vLLM and OpenRLHF in Ray's processes")
        with suppress(OSError):  # another node need not have the folder
            os.chdir(working_folder)
        processes.add_programs_to_path()
        # A reward's or agent's file may import its neighbors, as a program that Python starts may.
        files = (Flags(run.openrlhf).value(flag) or "" for flag in ("--reward.remote_url", "--train.agent_func_path"))
        sys.path.extend(str(Path(file).resolve().parent) for file in files if file.endswith(".py"))
        begin(run)
        # Nodes of a cluster may differ, and the driver looked at its own only. Every worker does this, so that none can
        # afford the seconds of `stand_ins.flash_attn_failure`.
        installed = stand_ins.is_flash_attn_installed()
        patches.install(conditions if installed else [*conditions, stand_ins.WITHOUT_FLASH_ATTN])

    return in_worker


def local_paths(flags: Flags, run_dir: str | None) -> dict[str, str]:
    """The files and folders of this machine that a run's flags name and another node may open, each with its flag."""
    values = {"--run-dir": run_dir or ""}
    for flag in flags:
        if flag.name.endswith(_PATH_FLAG_ENDINGS) and flag.values:
            values[flag.name] = flag.values[0]
    flag_of_path = {}
    for name, value in values.items():
        for listed in value.split(","):
            path = os.path.expanduser(listed.strip())
            if path and os.path.exists(path):
                flag_of_path[path] = name
    return flag_of_path


def _check_paths(paths: Mapping[str, str]) -> None:
    """Raises ``UsageError`` for the first path of :func:`local_paths` that another node of the joined cluster lacks."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    @ray.remote(num_cpus=0)
    class Node:  # an actor: where a node lacks this project, its end says why; a task's does not
        def missing(self) -> list[str]:
            return [path for path in paths if not os.path.exists(path)]

    this_node = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    others = [node for node in nodes if node != this_node]
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in others]
    actors = [Node.options(scheduling_strategy=place).remote() for place in places]  # type: ignore[missing-attribute]
    for node, absent in zip(others, ray.get([actor.missing.remote() for actor in actors])):
        for path in absent:
            raise UsageError(
                f"{paths[path]} {path}: the cluster's node {nodes[node]} does not have it, and a process there may open"
                " it. Put it into a folder that all nodes share, or where it is under the same path on each of them."
            )


def _as_training_failed(error: Exception) -> TrainingFailed:
    """An error of OpenRLHF's program with its meaning or root cause, and the folder of Ray's logs.

    The traceback of an error without a known meaning is printed.
    """
    explained = explanation(error)
    if explained is None:
        traceback.print_exception(error)
    cause, logs = explained or root_cause(error), ""
    with suppress(ImportError, AttributeError):
        import ray

        node = ray._private.worker._global_node  # No public accessor in Ray 2.55.
        if node is not None:
            failure = next((what for words, what in _ENGINE_ERRORS.items() if words in cause), None)
            message = None if failure is None else engine_error(Path(node.get_logs_dir_path()))
            if message:
                cause = f"{failure}: {explanation(RuntimeError(message)) or message}"
            logs = f"\n  logs of all processes: {node.get_logs_dir_path()}"
    return TrainingFailed(cause + logs)


def engine_error(logs: Path) -> str | None:
    """What an engine's own process failed with, which vLLM only logs, in Ray's folder of logs; None if nothing did."""
    error_line = r"\(EngineCore.* ERROR .*\] ((?:\w+\.)*\w*(?:Error|Exception): .+)"
    text = "\n".join(path.read_text(errors="replace") for path in logs.glob("worker-*"))
    messages = re.findall(error_line, text)
    return messages[-1] + _line_of_user_file(text) if messages else None


def _line_of_user_file(text: str) -> str:
    """The last line of a method's own file in a traceback, as a line of a message; empty if there is none."""
    places = re.findall(r'File "<(.+), from the spec>", line (\d+), in (\w+)', text)
    if not places:
        return ""
    file, number, function = places[-1]
    return f"\n  at line {number} of {file}, in {function}()"


# ---- why a training ended, and its left-over processes ------------------------------------------------------------


def root_cause(error: BaseException) -> str:
    """The innermost error of a chain of Ray errors in one paragraph, and where it was raised."""
    chain = _chain(error)
    functions = [str(link.function_name) for link in chain if getattr(link, "function_name", "")]
    text = str(chain[-1]).strip() or "(no message)"
    name = type(chain[-1]).__name__
    cause_text = f"{name}: {text}"
    # An actor that died while it was made has its whole traceback as its message; the error's own line
    # is the last one that is not indented.
    lines = [line for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
    if lines and "\n  File " in text:
        cause_text = lines[-1] + f"\n  ({name}; the traceback is above)"
    cause_text += _line_of_user_file("\n".join(map(str, chain)))
    return f"{cause_text}\n  in {functions[-1]}" if functions else cause_text


def explanation(error: BaseException) -> str | None:
    """A known error's meaning for the user, in one paragraph; None for any other error."""
    texts = [str(link).strip() for link in _chain(error)]
    for pattern, meaning in _MEANING_OF_ERROR.items():
        for text in texts:
            if re.search(pattern, text):
                lines = text.splitlines()
                matching = [line for line in lines if re.search(pattern, line)]
                # A pattern may match over several lines only.
                line = matching[0] if matching else lines[-1]
                return f"{meaning} {line.strip()}"
    return None


def _chain(error: BaseException) -> list[BaseException]:
    """An error, its cause, and so on; a RayTaskError has the error as it was raised in its ``cause``."""
    chain = [error]
    while True:
        cause = getattr(chain[-1], "cause", None)
        following = cause if isinstance(cause, BaseException) else chain[-1].__cause__
        if following is None or following in chain:
            return chain
        chain.append(following)


def end_processes(run_id: str) -> None:
    """Ends this machine's processes that still have a run's identity, after a few seconds of grace.

    Ray ends its own workers, but not their children: torch's compiler processes outlive a worker that was killed.
    """
    import psutil

    def left() -> list[psutil.Process]:
        processes_of_run = []
        for process in psutil.process_iter(["environ"]):
            environment = process.info["environ"] or {}  # None for a process of another user
            if process.pid != os.getpid() and environment.get(RUN_ID) == run_id:
                processes_of_run.append(process)
        return processes_of_run

    psutil.wait_procs(left(), timeout=_GRACE_SECONDS)
    for process in left():
        with suppress(psutil.NoSuchProcess):
            process.kill()
