# SPDX-License-Identifier: Apache-2.0
"""`ngrpo` with the weight sync and the sleep of a GPU, on a CPU: OpenRLHF's and vLLM's own code runs in both.

The CPU profile replaces OpenRLHF's weight sync by a file, and vLLM's CPU worker ignores sleep. Here the patches lose
those rows and gain others, which replace CUDA's part alone: NCCL by gloo, a CUDA IPC handle by a file in shared
memory, CUDA's memory pools by their bytes. A byte that sleeps is 255 (NaN in every floating-point dtype), and so is
one of a weight that its sender has freed: whatever reads either shows it.

``python -m tests.pipeline.as_on_cuda train …`` is ``ngrpo train …``. What happens is noted in $REHEARSAL/journal.
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
V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_OURS = f"{__name__ if __name__ != '__main__' else 'tests.pipeline.as_on_cuda'}:"
_ACTOR, _WRAP = "openrlhf.trainer.ray.ppo_actor", "openrlhf.trainer.ray.vllm_worker_wrap"
_ROWS = (
    ("torch", "empty", "cuda_is_the_host"),
    ("torch.cuda", "current_stream", "nothing"),
    ("torch.cuda", "synchronize", "nothing"),
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
    """Changes the table of this process, before its rows are put in place."""
    from ngrpo import patches
    from ngrpo.trainers.openrlhf import actor_trainer

    actor_trainer.syncs_by_file = lambda: False
    patches.OPENRLHF = (*_patches(), *patches.OPENRLHF)


def _patches() -> list[Any]:
    from ngrpo.machine.upstream.patch import Patch

    ours = [Patch(module, name, _OURS + act, "cpu", "sha:", "", "") for module, name, act in _ROWS]
    return [dataclasses.replace(row, upstream=row.state()) for row in ours]


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
    """A training under this folder, and its journal.

    ``v2`` chooses vLLM's V2 model runner, its default on a GPU, whose Triton kernels are interpreted.
    """
    plugin = folder / "plugin" / "rehearsal-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: rehearsal\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text(f"[vllm.general_plugins]\nrehearsal = {_OURS}begin_in_engine\n")
    paths = os.pathsep.join([str(ROOT), str(plugin.parent), os.environ.get("PYTHONPATH", "")])
    environment = {FOLDER: str(folder), "PYTHONPATH": paths, V2_RUNNER: str(int(v2))}
    if v2:
        (plugin.parent / "sitecustomize.py").write_text(_INTERPRETED_IN_ENGINES)
    program = [sys.executable, "-m", _OURS.rstrip(":"), "train", "--run-dir"]
    result = train(folder / "run", model, *flags, env=environment, program=program)
    journal = (folder / "journal").read_text().splitlines() if (folder / "journal").is_file() else []
    return result, [json.loads(line) for line in journal]


def in_every_worker(setup_hook: Callable[..., Callable[[], None]]) -> Callable[..., Callable[[], None]]:
    """`launch.setup_hook`, whose hook begins here."""

    def make(*args: object) -> Callable[[], None]:
        original = setup_hook(*args)

        def in_worker() -> None:
            if os.environ.get(V2_RUNNER) == "1":  # the front end of an engine asks for Triton too
                from tests.stack.as_on_cuda import interpret_triton

                interpret_triton()
            from tests.pipeline import as_on_cuda

            as_on_cuda.begin()
            original()

        return in_worker

    return make


def note(what: str, **more: object) -> None:
    """A line in the journal, which all processes write."""
    line = json.dumps({"what": what, "at": round(time.time(), 1), "process": os.getpid(), **more})
    with open(Path(os.environ[FOLDER], "journal"), "a") as journal:
        journal.write(line + "\n")


# --- CUDA's part of the sync -----------------------------------------------------------------------------------------


def cuda_is_the_host(original: Callable[..., Any]) -> Callable[..., Any]:
    def empty(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "device": "cpu"} if kwargs.get("device") == "cuda" else kwargs)

    return empty


def nothing(original: Callable[..., Any]) -> Callable[..., None]:
    return lambda *args: None


def adam_of_pytorch(original: type) -> type:
    """The CPU profile's optimizer: ZeRO-3 offloads only what has this name."""
    return torch.optim.AdamW


def gpu_of_ray(original: Callable[..., str]) -> Callable[..., str]:
    """The GPU that Ray gave a process: trainer and engine of one bundle must have the same."""
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


_lent: list[tuple[str, Any]] = []


def lent_in_shared_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    """A handle as CUDA's: the receiver sees the sender's memory, and rubbish once the sender has freed it."""

    def reduce_tensor(tensor: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        _take_back()
        path = f"/dev/shm/ngrpo-rehearsal-{uuid4().hex}"
        memory = torch.from_file(path, shared=True, size=tensor.nbytes, dtype=torch.uint8)
        memory.copy_(tensor.detach().reshape(-1).view(torch.uint8))
        _lent.append((path, memory))
        return opened, (path, tensor.nbytes, tensor.dtype, tuple(tensor.shape), None, None, "the sender's device")

    return reduce_tensor


def opened(path: str, size: int, dtype: Any, shape: tuple[int, ...], *_: object) -> Any:
    """What a handle leads to."""
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8).view(dtype).reshape(shape)


def _take_back() -> None:
    for path, memory in _lent:
        memory.fill_(255)
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


# Bytes: NaN in any floating-point dtype; 48 or so. (vLLM's CPU kernels read whole blocks.)
_SLEEPING, _RUBBISH = 255, 66


def _cpu_storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    parts = (part for part in tree_leaves(tree) if isinstance(part, Tensor) and part.device.type == "cpu")
    return {part.untyped_storage()._cdata: part.untyped_storage() for part in parts}


class _Allocations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = _cpu_storages((args, kwargs))
        self.made |= {key: StorageWeakRef(part) for key, part in _cpu_storages(out).items() if key not in given}
        return out


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

    def _parts(self, tag: str) -> Iterator[Tensor]:
        for reference in self._pools[tag].made.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None and storage.nbytes():
                yield torch.empty(0, dtype=torch.uint8).set_(storage)

    def addresses(self) -> set[int]:
        """Where the parts of all pools begin."""
        return {part.data_ptr() for tag in self._pools for part in self._parts(tag)}

    def suspend(self, level: int) -> None:
        """Takes the bytes of all pools away."""
        for tag in self._pools:
            parts = list(self._parts(tag))
            self._asleep[tag] = [(part, part.clone() if tag == "weights" else None) for part in parts]
            for part in parts:
                part.fill_(_SLEEPING)

    def resume(self, tags: list[str] | None) -> None:
        """Gives those of some pools back."""
        for tag in tags or list(self._asleep):
            for part, saved in self._asleep.pop(tag):
                part.fill_(_RUBBISH) if saved is None else part.copy_(saved)


def sleeping_worker(plain: type) -> type:
    """vLLM's worker for CPUs with the sleep of the one for GPUs, which ours is attached to."""

    class SleepingWorker(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *args: object, **kwargs: object) -> None:
            self.pools = Pools()
            super().__init__(*args, **kwargs)

        def _maybe_get_memory_pool_context(self, tag: str) -> Any:
            return self.pools.open(tag)

        def _get_sleep_mode_backend(self) -> Pools:
            return self.pools

        def sleep(self, level: int = 1) -> None:
            model, asleep = self.model_runner.get_model(), self.pools.addresses()
            weights = {part.untyped_storage().data_ptr() for part in _tensors_of(model)}
            ours = {part.untyped_storage().data_ptr() for part in _tensors_of(self.perturbation)} - weights
            parts = model.named_parameters()
            awake = [name for name, part in parts if part.untyped_storage().data_ptr() not in asleep]
            note("sleep", ours=len(ours), lost=len(ours & asleep), awake=awake, v2=self.use_v2_model_runner)
            with patch("torch.accelerator.get_memory_info", lambda: (0, 0)):  # of which it must not use more
                super(plain, self).sleep(level)

        def wake_up(self, tags: list[str] | None = None) -> None:
            note("wake_up", tags=tags)
            super(plain, self).wake_up(tags)

    return SleepingWorker


def _tensors_of(root: object) -> list[Any]:
    """The tensors of an object and of what it is made of, as far as the project and torch's modules reach."""
    found, seen, left = [], set(), [root]
    while left:
        part = left.pop()
        if id(part) in seen or isinstance(part, str | bytes | int | float | np.ndarray | type):
            continue
        seen.add(id(part))
        if isinstance(part, torch.Tensor):
            if part.numel():
                found.append(part)
        elif isinstance(part, Mapping):
            left += part.values()
        elif isinstance(part, list | tuple | set):
            left += part
        elif isinstance(part, torch.nn.Module) or type(part).__module__.startswith(("ngrpo", "perturbations")):
            slots = (name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ()))
            left += [*getattr(part, "__dict__", {}).values(), *(getattr(part, name, None) for name in slots)]
    return found


# --- what happens ----------------------------------------------------------------------------------------------------


def noted_sync(original: Callable[..., None]) -> Callable[..., None]:
    """All weights go to a file as well, for the engines to compare with theirs; LoRA sends those that it changes."""

    def broadcast_to_vllm(self: Any) -> None:
        from ngrpo.machine.models import lora
        from ngrpo.trainers.openrlhf import lora_sync
        from ngrpo.trainers.openrlhf.actor_trainer import gathered

        weights = gathered(self, keep=True)
        if torch.distributed.get_rank() == 0:
            save_file({name: part.clone() for name, part in weights.items()}, Path(os.environ[FOLDER], "sent"))
            model, names = self.actor.model.module, list(weights)
            if lora.has_adapters(model):
                changed = lora.changed_weights(model, lora_sync.noised_weights(model))
                names = [weight.name for weight in changed]
            note("sync", parameters=names)
        torch.distributed.barrier()
        original(self)
        _take_back()

    return broadcast_to_vllm


def noted_update(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def update(self: Any, name: str, *args: Any, **kwargs: Any) -> None:
        original(self, name, *args, **kwargs)
        note("update", name=name, by=original.__name__)

    return update


def noted_prepare(original: Callable[..., None]) -> Callable[..., None]:
    """On CUDA a table of neighbors is made ahead; weights are compared with those that were sent."""

    def prepare(self: Any) -> None:
        self._ahead = True
        original(self)
        sent = Path(os.environ[FOLDER], "sent")
        note("prepare", wrong=list(_wrong(self, sent)) if sent.is_file() else [])

    return prepare


_STACKED = {".qkv_proj.": (".q_proj.", ".k_proj.", ".v_proj."), ".gate_up_proj.": (".gate_proj.", ".up_proj.")}


def _wrong(attached: Any, sent: Path) -> Iterator[str]:
    """The engine's parameters that are not, to the bit, what was sent."""
    from perturbations import parameters

    own: dict[str, Any] = {}
    weights = dict(parameters.split(load_file(sent).items(), own))
    there = dict(attached._runner.get_model().named_parameters())
    if attached.module is not None:
        there |= {f"own {name}": part for name, part in attached.module.named_parameters()}
        weights |= {f"own {name.rpartition('.')[2]}": part for name, part in own.items()}
    for name, part in there.items():
        stacked = next((key for key in _STACKED if key in name), None)
        names = [name.replace(stacked, one) for one in _STACKED[stacked]] if stacked else [name]
        expected = torch.cat([weights.pop(one) for one in names])
        if not torch.equal(part[: len(expected)], expected):
            yield name
    yield from (name for name in weights if name != "lm_head.weight")  # which is not there where it is tied


def main() -> None:
    """`ngrpo` in this process."""
    from ngrpo import cli
    from ngrpo.config import compatibility
    from ngrpo.trainers.openrlhf import launch

    compatibility.HARDWARE = ()  # NCCL and sleep are what is rehearsed
    begin()
    launch.setup_hook = in_every_worker(launch.setup_hook)
    sys.exit(cli.main())


if __name__ == "__main__":
    main()
