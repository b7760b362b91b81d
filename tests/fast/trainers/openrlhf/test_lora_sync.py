# SPDX-License-Identifier: Apache-2.0
"""Merged weights on their way to engines: by a group, by CUDA IPC handles, or as a file; and the saved adapter."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("ray")
pytest.importorskip("openrlhf")

from ngrpo.machine.models import lora
from ngrpo.trainers.openrlhf import actor_trainer, lora_sync
from perturbations import UsageError
from tests.support.lora_models import adapted, base_model
from tests.support.run import run_with

Q_PROJ = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)]


class Engine:
    """A Ray actor whose methods are called at once; it keeps the name and dtype of each update."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, torch.dtype, tuple[int, ...], bool]] = []
        self.handles: list[dict[str, Any]] = []
        self.resets = 0
        self.update_weight = SimpleNamespace(remote=self._update)
        self.update_weight_cuda_ipc = SimpleNamespace(remote=self._update_by_ipc)
        self.reset_prefix_cache = SimpleNamespace(remote=self._reset)

    def _update(self, name: str, dtype: torch.dtype, shape: torch.Size, empty_cache: bool) -> None:
        self.calls.append((name, dtype, tuple(shape), empty_cache))

    def _update_by_ipc(self, name: str, ipc_handles: dict[str, Any], **call: Any) -> None:
        self._update(name, **call)
        self.handles.append(ipc_handles)

    def _reset(self) -> None:
        self.resets += 1


class Group:
    """The group of OpenRLHF's sync: it keeps what rank 0 sends."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object) -> None:
        assert src == 0
        self.sent.append(tensor.clone())


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """OpenRLHF's trainer on a GPU that is not there, one rank with two engines; its model has adapters of q_proj."""
    distributed = ModuleType("openrlhf.utils.distributed_util")
    distributed.torch_dist_barrier_and_cuda_sync = lambda: None  # type: ignore[attr-defined]
    devices = ModuleType("openrlhf.trainer.ray.utils")
    devices.get_physical_gpu_id = lambda: "GPU-0"  # type: ignore[attr-defined]
    reductions = ModuleType("torch.multiprocessing.reductions")
    reductions.reduce_tensor = lambda tensor: tensor.clone()  # type: ignore[attr-defined]
    zero = SimpleNamespace(GatheredParameters=lambda parameters, enabled: nullcontext())
    deepspeed = ModuleType("deepspeed")
    deepspeed.zero = zero  # type: ignore[attr-defined]
    for module in (distributed, devices, reductions, deepspeed):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("ray.get", lambda refs: refs)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)

    def all_gather(places: list[Any], own: Any) -> None:
        places[0] = own

    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    model = adapted(base_model("untied"), target_modules=["q_proj"])
    vllm = SimpleNamespace(enable_prefix_caching=True, sync_with_ray=False)
    args = SimpleNamespace(vllm=vllm, ds=SimpleNamespace(zero_stage=2, tensor_parallel_size=1))
    made = actor_trainer.actor_trainer(object)()
    made.strategy, made.vllm_engines = SimpleNamespace(args=args), [Engine(), Engine()]
    made.actor = SimpleNamespace(model=SimpleNamespace(module=model))
    made._model_update_group, made.use_cuda_ipc = Group(), False
    return made


def merged(trainer: Any) -> list[torch.Tensor]:
    return [weight.merged() for weight in lora.changed_weights(trainer.actor.model.module)]


@pytest.mark.parametrize("use_cuda_ipc", [False, True])
def test_engines_get_merged_weights_under_their_names(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, use_cuda_ipc: bool
) -> None:
    run_with(monkeypatch, hardware="cuda")
    monkeypatch.setattr(actor_trainer, "syncs_by_file", lambda: False)
    trainer.use_cuda_ipc = use_cuda_ipc
    trainer.broadcast_to_vllm()
    shape = (16, 16)
    calls = [(Q_PROJ[0], torch.float32, shape, False), (Q_PROJ[1], torch.float32, shape, True)]
    for engine in trainer.vllm_engines:
        assert engine.calls == calls, "the last weight ends the sync, and neighbors are computed anew"
        assert engine.resets == 1
        sent = [handles["GPU-0"] for handles in engine.handles] if use_cuda_ipc else trainer._model_update_group.sent
        assert all(torch.equal(tensor, wanted) for tensor, wanted in zip(sent, merged(trainer), strict=True))


def test_the_file_has_all_weights(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, hardware="cpu")
    tensors = actor_trainer.gathered(trainer, keep=True)
    assert list(tensors) == [name for name, _ in base_model("untied").named_parameters()]
    assert torch.equal(tensors[Q_PROJ[0]], merged(trainer)[0])
    assert actor_trainer.gathered(trainer, keep=False) == {}


def test_noise_is_that_of_full_training(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine's names, on W below the adapter: the merged weight has it, and A and B have none."""
    run_with(monkeypatch, policy_noise={"name": "psn", "sigma": 0.1}, hardware="cuda")
    noise = actor_trainer.current_run().policy_noise
    plain, model = base_model("untied"), trainer.actor.model.module
    with noise.added(dict(plain.named_parameters()), 0.1, 3):
        wanted = {name: parameter.clone() for name, parameter in plain.named_parameters()}
    with noise.added(lora.base_parameters(model), 0.1, 3):
        sent = {w.name: w.merged().clone() for w in lora.changed_weights(model, lora_sync.noised_weights(model))}
    assert set(sent) == {*Q_PROJ, *(name for name in wanted if ".mlp." in name)}
    assert all(torch.equal(sent[name], wanted[name]) for name in sent if name not in Q_PROJ)
    assert torch.equal(sent[Q_PROJ[0]], merged(trainer)[0])


def test_a_model_whose_adapters_do_not_fit_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Actor:
        def __init__(self, model: Any) -> None:
            self.model = model

    Actor.__init__ = lora_sync.checked_actor(Actor.__init__)  # type: ignore[method-assign]
    on_embedding = adapted(base_model("untied"), target_modules=["embed_tokens"])
    run_with(monkeypatch, perturbation={"name": "none"})
    assert Actor(on_embedding).model is on_embedding
    run_with(monkeypatch, perturbation={"name": "soft"})
    with pytest.raises(UsageError, match="the input embedding"):
        Actor(on_embedding)
    Actor(base_model("untied"))


def test_a_saved_folder_is_an_adapter(trainer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PEFT loads it onto the base model, to the bit; no config.json makes it look like a whole model."""
    from peft import PeftModel

    class Actor:
        model = trainer.actor.model.module

    models = ModuleType("openrlhf.models")
    models.Actor = Actor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "openrlhf.models", models)
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: Path(folder, "tokenizer.json").write_text("{}"))
    strategy = SimpleNamespace(stage=2, is_rank_0=lambda: True, _unwrap_model=lambda actor: actor.model)

    def upstream(*args: object, **kwargs: object) -> None:
        raise AssertionError("OpenRLHF's own gathers the whole model")

    lora_sync.save_model(upstream)(strategy, Actor(), tokenizer, str(tmp_path))
    names = {file.name for file in tmp_path.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert "config.json" not in names
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 8
    loaded = PeftModel.from_pretrained(base_model("untied"), str(tmp_path))
    again = [weight.merged() for weight in lora.engine_weights(loaded) if weight.adapter is not None]
    assert all(torch.equal(one, other) for one, other in zip(again, merged(trainer), strict=True))
