# SPDX-License-Identifier: Apache-2.0
"""`ngrpo` with the weight sync and the sleep of a GPU, on a CPU: OpenRLHF's and vLLM's own code runs in both.

The CPU profile replaces OpenRLHF's weight sync by a file, and vLLM's CPU worker ignores sleep. Here the patches lose
those rows and gain others, which replace CUDA's part alone: NCCL by gloo, a CUDA IPC handle by a file in shared
memory, CUDA's memory pools by their bytes. A byte that sleeps is 255 (NaN in every floating-point dtype), and so is a
byte of a weight that its sender has freed, so whatever reads one of them becomes NaN.

``python -m tests.pipeline.as_on_cuda train …`` is ``ngrpo train …``. Every process notes its syncs and its sleep in the
file $REHEARSAL/journal.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.pipeline.harness import ROOT, train

FOLDER = "REHEARSAL"
"""The environment variable with the folder of a rehearsal."""
V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
MODULE = "tests.pipeline.as_on_cuda"
"""This module's name, also where it runs as ``__main__``."""
_ACTOR = "openrlhf.trainer.ray.ppo_actor"
_WRAP = "openrlhf.trainer.ray.vllm_worker_wrap"
# Upstream's module, the name in it, and the function below that makes its replacement.
_ROWS = (
    ("torch", "empty", "cuda_is_the_host"),
    ("torch.cuda", "current_stream", "does_nothing"),
    ("torch.cuda", "synchronize", "does_nothing"),
    ("torch.multiprocessing.reductions", "reduce_tensor", "lent_in_shared_memory"),
    ("deepspeed.ops.adam.fused_adam", "FusedAdam", "adam_of_pytorch"),
    ("openrlhf.trainer.ray.utils", "get_physical_gpu_id", "gpu_of_ray"),
    ("vllm.distributed.device_communicators.pynccl", "PyNcclCommunicator", "over_gloo"),
    ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", "not_packed"),
    ("vllm.platforms.cpu", "CpuPlatform.is_sleep_mode_available", "available"),
    ("vllm.v1.worker.cpu_worker", "CPUWorker", "sleeping_worker"),
    ("ngrpo.rollout.attach", "AttachedPerturbation.prepare", "noted_prepare"),
    (_WRAP, "WorkerWrap.update_weight", "noted_update"),
    (_WRAP, "WorkerWrap.update_weight_cuda_ipc", "noted_update"),
    (_ACTOR, "ActorPPOTrainer.broadcast_to_vllm", "noted_sync"),
    ("ngrpo.trainers.openrlhf.lora_sync", "send_merged_weights", "noted_sync"),
)


def begin() -> None:
    """Changes the table of patches of this process, before its rows are put in place."""
    from ngrpo import patches
    from ngrpo.trainers.openrlhf import actor_trainer

    actor_trainer.syncs_by_file = lambda: False
    patches.OPENRLHF = (*_patches(), *patches.OPENRLHF)


def _patches() -> list[Any]:
    """The rows as patches that fit the installed upstream, whichever release it is."""
    from ngrpo.machine.upstream.patch import Patch

    patches = []
    for module, attribute, function in _ROWS:
        row = Patch(
            module=module,
            attribute=attribute,
            ours=f"{MODULE}:{function}",
            when="cpu",
            upstream="sha:",
            checked="",
            why="",
        )
        patches.append(dataclasses.replace(row, upstream=row.state()))
    return patches


def begin_in_engine() -> None:
    """A plugin of vLLM's, for the process of an engine's core, which Ray does not start."""
    from ngrpo.machine.upstream.patch import place

    place(_patches())


# Python runs this file when a process starts. The core of an engine is spawned, and Triton must be interpreted there
# before torch is imported, which loads Triton.
_INTERPRETED_IN_ENGINES = """
import sys

if any("multiprocessing.spawn" in word for word in sys.orig_argv):
    from tests.stack.as_on_cuda import interpret_triton

    interpret_triton()
"""


def rehearse(
    folder: Path, model: str, *flags: str, v2: bool = False
) -> tuple[subprocess.CompletedProcess, list[dict[str, Any]]]:
    """A training in ``folder / "run"``, and the entries of its journal.

    ``v2`` chooses vLLM's V2 model runner, its default on a GPU, whose Triton kernels are interpreted.
    """
    packages = folder / "plugin"
    plugin = packages / "rehearsal-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: rehearsal\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text(f"[vllm.general_plugins]\nrehearsal = {MODULE}:begin_in_engine\n")
    if v2:
        (packages / "sitecustomize.py").write_text(_INTERPRETED_IN_ENGINES)
    python_path = [str(ROOT), str(packages), os.environ.get("PYTHONPATH", "")]
    environment = {
        FOLDER: str(folder),
        "PYTHONPATH": os.pathsep.join(python_path),
        V2_RUNNER: str(int(v2)),
    }
    program = [sys.executable, "-m", MODULE, "train", "--run-dir"]
    result = train(folder / "run", model, *flags, env=environment, program=program)
    journal = folder / "journal"
    if not journal.is_file():
        return result, []
    return result, [json.loads(line) for line in journal.read_text().splitlines()]


def in_every_worker(setup_hook: Callable[..., Callable[[], None]]) -> Callable[..., Callable[[], None]]:
    """`launch.setup_hook`, whose hook calls :func:`begin` first."""

    def make(*args: object) -> Callable[[], None]:
        original = setup_hook(*args)

        def in_worker() -> None:
            if os.environ.get(V2_RUNNER) == "1":  # The front end of an engine imports Triton too.
                from tests.stack.as_on_cuda import interpret_triton

                interpret_triton()
            from tests.pipeline import as_on_cuda

            as_on_cuda.begin()
            original()

        return in_worker

    return make


def note(event: str, **details: object) -> None:
    """Adds an entry to the journal, which all processes write."""
    entry = {"event": event, "at": round(time.time(), 1), "process": os.getpid(), **details}
    with open(Path(os.environ[FOLDER], "journal"), "a") as journal:
        journal.write(json.dumps(entry) + "\n")


# --- CUDA's part of the sync -----------------------------------------------------------------------------------------


def cuda_is_the_host(original: Callable[..., Any]) -> Callable[..., Any]:
    def empty(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return original(*args, **kwargs)

    return empty


def does_nothing(original: Callable[..., Any]) -> Callable[..., None]:
    return lambda *args: None


def adam_of_pytorch(original: type) -> type:
    """The CPU profile's optimizer: ZeRO-3 offloads only what has this name."""
    return torch.optim.AdamW


def gpu_of_ray(original: Callable[..., str]) -> Callable[..., str]:
    """The GPU that Ray gave a process, by which an engine finds the handle of the trainer in its own bundle."""
    return lambda: f"GPU-{os.environ['CUDA_VISIBLE_DEVICES']}"


def over_gloo(original: type) -> type:
    class GlooCommunicator:
        def __init__(self, group: Any, device: object) -> None:
            import torch.distributed as dist

            store = dist.PrefixStore("rehearsal", group.store)
            self._group = dist.ProcessGroupGloo(store, group.rank, group.world_size, timedelta(seconds=90))

        def broadcast(self, tensor: Any, src: int, stream: object) -> None:
            import torch.distributed as dist

            options = dist.BroadcastOptions()
            options.rootRank = src
            self._group.broadcast([tensor], options).wait()

    return GlooCommunicator


# 255 in every byte is NaN in any floating-point dtype. 66 in every byte is 48 or so in float32: vLLM's CPU kernels read
# whole blocks of the KV cache, and a NaN in such a block would spread.
_SLEEPING = 255
_RUBBISH = 66

_lent: list[tuple[str, Any]] = []
"""The files in shared memory that this process has lent, by their paths, and the memory that they map."""


def lent_in_shared_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    """A handle as CUDA's: the receiver sees the sender's memory, and NaN once the sender has freed it."""

    def reduce_tensor(tensor: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        _free_lent()
        path = f"/dev/shm/ngrpo-rehearsal-{uuid4().hex}"
        memory = torch.from_file(path, shared=True, size=tensor.nbytes, dtype=torch.uint8)
        memory.copy_(tensor.detach().reshape(-1).view(torch.uint8))
        _lent.append((path, memory))
        # OpenRLHF's worker replaces the argument at index 6, the sender's device, by its own.
        return opened, (path, tensor.nbytes, tensor.dtype, tuple(tensor.shape), None, None, "the sender's device")

    return reduce_tensor


def opened(path: str, nbytes: int, dtype: Any, shape: tuple[int, ...], *_: object) -> Any:
    """The lent tensor, as the receiver of a handle opens it."""
    memory = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    return memory.view(dtype).reshape(shape)


def _free_lent() -> None:
    for path, memory in _lent:
        memory.fill_(_SLEEPING)
        os.unlink(path)
    _lent.clear()


def not_packed(original: Callable[..., None]) -> Callable[..., None]:
    """Linear layers keep their weights, as on CUDA; vLLM packs them on a CPU, after which nothing can be loaded."""

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    return dispatch


# --- CUDA's part of sleep --------------------------------------------------------------------------------------------


def available(original: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *args: True


def _cpu_storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of all CPU tensors in a tree, by the address of torch's object for each."""
    storages = {}
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
            storage = leaf.untyped_storage()
            storages[storage._cdata] = storage
    return storages


class _Allocations(TorchDispatchMode):
    """Remembers the storages that operations make inside it, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs = _cpu_storages((args, kwargs))
        for key, storage in _cpu_storages(output).items():
            if key not in inputs:
                self.made[key] = StorageWeakRef(storage)
        return output


class Pools:
    """As vLLM's sleep at level 1 on CUDA: weights come back as they were, the KV cache as rubbish."""

    def __init__(self) -> None:
        self._pools: dict[str, _Allocations] = {}
        self._asleep: dict[str, list[tuple[Tensor, Tensor | None]]] = {}

    @contextmanager
    def open(self, tag: str) -> Iterator[None]:
        """What is allocated within, and lives longer, belongs to the pool."""
        with self._pools.setdefault(tag, _Allocations()):
            yield

    def _blocks(self, tag: str) -> Iterator[Tensor]:
        """The bytes of each storage in a pool that is still alive, (N,) uint8."""
        for reference in self._pools[tag].made.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None and storage.nbytes():
                yield torch.empty(0, dtype=torch.uint8).set_(storage)

    def addresses(self) -> set[int]:
        """Where the blocks of all pools begin."""
        return {block.data_ptr() for tag in self._pools for block in self._blocks(tag)}

    def suspend(self, level: int) -> None:
        """Takes the bytes of all pools away."""
        for tag in self._pools:
            self._asleep[tag] = []
            for block in list(self._blocks(tag)):
                saved = block.clone() if tag == "weights" else None
                self._asleep[tag].append((block, saved))
                block.fill_(_SLEEPING)

    def resume(self, tags: list[str] | None) -> None:
        """Gives the bytes of some pools back, or of all."""
        for tag in tags or list(self._asleep):
            for block, saved in self._asleep.pop(tag):
                if saved is None:
                    block.fill_(_RUBBISH)
                else:
                    block.copy_(saved)


def sleeping_worker(plain: type) -> type:
    """vLLM's worker for CPUs with the sleep of its base class, the worker for GPUs, which has the project's patches."""

    class SleepingWorker(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *args: object, **kwargs: object) -> None:
            self.pools = Pools()
            super().__init__(*args, **kwargs)

        def _maybe_get_memory_pool_context(self, tag: str) -> Any:
            return self.pools.open(tag)

        def _get_sleep_mode_backend(self) -> Pools:
            return self.pools

        def sleep(self, level: int = 1) -> None:
            model = self.model_runner.get_model()
            asleep = self.pools.addresses()
            weights = {_storage_address(tensor) for tensor in _tensors_of(model)}
            perturbations = {_storage_address(tensor) for tensor in _tensors_of(self.perturbation)} - weights
            awake = [name for name, weight in model.named_parameters() if _storage_address(weight) not in asleep]
            note(
                "sleep",
                ours=len(perturbations),
                lost=len(perturbations & asleep),
                awake=awake,
                v2=self.use_v2_model_runner,
            )
            # The base class asks the device before and after sleep: it must not use more memory than before.
            with patch("torch.accelerator.get_memory_info", lambda: (0, 0)):
                super(plain, self).sleep(level)

        def wake_up(self, tags: list[str] | None = None) -> None:
            note("wake_up", tags=tags)
            super(plain, self).wake_up(tags)

    return SleepingWorker


def _storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors_of(root: object) -> list[Any]:
    """The tensors of an object and of what it is made of, as far as the project and torch's modules reach."""
    tensors: list[Any] = []
    visited: set[int] = set()
    pending = [root]
    while pending:
        value = pending.pop()
        if id(value) in visited or isinstance(value, str | bytes | int | float | np.ndarray | type):
            continue
        visited.add(id(value))
        if isinstance(value, Tensor):
            if value.numel():
                tensors.append(value)
        elif isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, list | tuple | set):
            pending += value
        elif isinstance(value, torch.nn.Module) or type(value).__module__.startswith(("ngrpo", "perturbations")):
            pending += _attributes_of(value)
    return tensors


def _attributes_of(owner: object) -> list[Any]:
    """The values of an object's attributes, also of those in slots."""
    values = list(getattr(owner, "__dict__", {}).values())
    for base in type(owner).__mro__:
        for name in getattr(base, "__slots__", ()):
            values.append(getattr(owner, name, None))
    return values


# --- what happens ----------------------------------------------------------------------------------------------------


def noted_sync(original: Callable[..., None]) -> Callable[..., None]:
    """All weights go to a file as well, for the engines to compare with theirs.

    The journal's entry names the parameters that engines must get: with LoRA those that training changes.
    """

    def broadcast_to_vllm(self: Any) -> None:
        from ngrpo.machine.models import lora
        from ngrpo.trainers.openrlhf import lora_sync
        from ngrpo.trainers.openrlhf.actor_trainer import gathered

        weights = gathered(self, keep=True)
        if torch.distributed.get_rank() == 0:
            copies = {name: weight.clone() for name, weight in weights.items()}
            save_file(copies, Path(os.environ[FOLDER], "sent"))
            model = self.actor.model.module
            names = list(weights)
            if lora.has_adapters(model):
                changed = lora.changed_weights(model, lora_sync.noised_weights(model))
                names = [weight.name for weight in changed]
            note("sync", parameters=names)
        torch.distributed.barrier()
        original(self)
        _free_lent()

    return broadcast_to_vllm


def noted_update(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def update(self: Any, name: str, *args: Any, **kwargs: Any) -> None:
        original(self, name, *args, **kwargs)
        note("update", name=name, by=original.__name__)

    return update


def noted_prepare(original: Callable[..., None]) -> Callable[..., None]:
    """Makes a table of neighbors ahead, as on CUDA, and compares the weights with those that were sent."""

    def prepare(self: Any) -> None:
        self._prepares = True
        original(self)
        sent = Path(os.environ[FOLDER], "sent")
        wrong = list(_wrong_parameters(self, sent)) if sent.is_file() else []
        note("prepare", wrong=wrong)

    return prepare


_FUSED = {
    ".qkv_proj.": (".q_proj.", ".k_proj.", ".v_proj."),
    ".gate_up_proj.": (".gate_proj.", ".up_proj."),
}


def _wrong_parameters(attached: Any, sent_file: Path) -> Iterator[str]:
    """The engine's parameters that are not, to the bit, what was sent."""
    from perturbations import parameters

    own: dict[str, Any] = {}
    sent = dict(parameters.split(load_file(sent_file).items(), own))
    held = dict(attached._runner.get_model().named_parameters())
    if attached.module is not None:
        for name, parameter in attached.module.named_parameters():
            held[f"own {name}"] = parameter
        for name, tensor in own.items():
            sent[f"own {name}"] = tensor
    for name, parameter in held.items():
        expected = torch.cat([sent.pop(sent_name) for sent_name in _sent_names(name)])
        # vLLM pads the rows of an embedding.
        if not torch.equal(parameter[: len(expected)], expected):
            yield name
    # A tied head is sent, but an engine has it in its embedding alone.
    yield from (name for name in sent if name != "lm_head.weight")


def _sent_names(name: str) -> list[str]:
    """The parameters that are sent for one of vLLM's, which holds some of a layer's matrices as one."""
    for fused, separate in _FUSED.items():
        if fused in name:
            return [name.replace(fused, projection) for projection in separate]
    return [name]


def main() -> None:
    """`ngrpo` in this process, as on CUDA."""
    from ngrpo import cli
    from ngrpo.config import compatibility
    from ngrpo.trainers.openrlhf import launch

    compatibility.HARDWARE = ()  # It would refuse NCCL and sleep, which are what is rehearsed.
    begin()
    launch.setup_hook = in_every_worker(launch.setup_hook)
    sys.exit(cli.main())


if __name__ == "__main__":
    main()
