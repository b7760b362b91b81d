# SPDX-License-Identifier: Apache-2.0
"""LoRA: the weights that an engine needs of a PEFT model.

PEFT keeps a linear layer's matrix W frozen and trains two thin matrices beside it, so that the layer computes

    y = W x + s · B (A x),    A: (r, in), B: (out, r), s: the scale.

vLLM runs one merged matrix, W + s · B A, under the name that the base model's checkpoint has for W. With QLoRA, W is
the dequantised weight of :mod:`ngrpo.machine.models.four_bit`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

from ngrpo.machine.models.four_bit import dequantised, is_four_bit
from ngrpo.machine.upstream.types import LoraLayer, PeftModel
from perturbations.errors import UsageError

_PREFIX = "base_model.model."  # of every parameter of the base model, in PEFT 0.21
_WRAPPED = ".base_layer"  # PEFT's name for the module that an adapter replaces
_COPIED = ".original_module"  # and for the module of which it trains a copy


@dataclass(frozen=True)
class EngineWeight:
    """One weight of the engine's model, and where the trainer has it.

    Attributes:
        name: of the weight in the base model's checkpoint, and so in vLLM.
        base: the trainer's parameter of this weight.
        adapter: PEFT's layer around the parameter; None where the parameter is sent as it is.
    """

    name: str
    base: nn.Parameter
    adapter: LoraLayer | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters that :meth:`merged` reads: ZeRO-3 has to gather them together."""
        return [self.base] if self.adapter is None else [self.base, *factors(self.adapter)]

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The weight as the engine takes it, in the parameter's dtype; the parameter itself where it has no adapter.

        W + s · B A is computed in float32 and rounded once: rounding s · B A to bfloat16 before the sum would lose
        updates that are smaller than the last digit of W. A 4-bit weight is dequantised first, with an adapter or
        without one.
        """
        weight = dequantised(self.base)
        if self.adapter is None:
            return weight
        return (weight.float() + update_of(self.adapter)).to(weight.dtype)


def factors(adapter: LoraLayer) -> tuple[nn.Parameter, nn.Parameter]:
    """The trained matrices A and B of one of PEFT's layers: of a linear layer (``lora_bias`` is refused) or a table."""
    name = adapter.active_adapters[0]
    if name in adapter.lora_embedding_A:
        return adapter.lora_embedding_A[name], adapter.lora_embedding_B[name]
    return next(adapter.lora_A[name].parameters()), next(adapter.lora_B[name].parameters())


def update_of(adapter: LoraLayer) -> Tensor:
    """s · B A of one of PEFT's layers in float32, in the shape of the weight below it.

    The scale is the layer's own, which PEFT computes from ``lora_alpha`` and the rank (rsLoRA: its square root).
    """
    from peft.tuners.lora.layer import Embedding, Linear

    name = adapter.active_adapters[0]
    down, up = factors(adapter)
    update = adapter.scaling[name] * (up.float() @ down.float())
    # A table of embeddings and GPT-2's Conv1D keep their matrices as (in, out).
    is_transposed = isinstance(adapter, Embedding) or (isinstance(adapter, Linear) and adapter.fan_in_fan_out)
    return update.T if is_transposed else update


def has_adapters(model: nn.Module) -> TypeGuard[PeftModel]:
    """Whether PEFT has wrapped a model."""
    return hasattr(model, "peft_config")


def engine_weights(model: nn.Module) -> list[EngineWeight]:
    """All weights that an engine of this model has, in the order of the model's parameters.

    ``model`` may be a model without adapters. The adapters must be ones that :func:`check_adapters` accepts.
    """
    if not has_adapters(model):
        return [EngineWeight(name, parameter) for name, parameter in model.named_parameters()]
    adapters = adapters_of(model)
    weights = []
    for name, parameter in model.named_parameters():
        if is_factor(name):
            continue
        module_name, _, parameter_name = name.rpartition(".")
        adapted_module = module_name.removesuffix(_WRAPPED)
        is_adapted = module_name.endswith(_WRAPPED) and parameter_name == "weight"
        adapter = adapters.pop(adapted_module) if is_adapted else None
        weights.append(EngineWeight(engine_name(name), parameter, adapter))
    if adapters:
        raise RuntimeError(
            f"LoRA: no weight of the model lies below the adapters of {', '.join(adapters)}, so that engines would"
            " roll out without them. Leave these modules out of --ds.lora.target_modules."
        )
    return weights


def changed_weights(model: nn.Module, noised: frozenset[str] = frozenset()) -> list[EngineWeight]:
    """The weights of :func:`engine_weights` that differ from the model that engines have loaded at their start.

    Weights without an adapter are frozen, so that they are sent only if they are trained (a perturbation's
    parameters), get a policy noise (``noised``, by the engine's names), or are 4-bit weights, whose dequantised values
    are not the checkpoint's.
    """
    return [
        weight
        for weight in engine_weights(model)
        if weight.adapter is not None or weight.base.requires_grad or weight.name in noised or is_four_bit(weight.base)
    ]


def base_parameters(model: nn.Module) -> Mapping[str, nn.Parameter]:
    """The parameters of a model by their names in the engine, without the matrices of adapters."""
    return {weight.name: weight.base for weight in engine_weights(model)}


def engine_name(name: str) -> str:
    """A parameter's name in the base model's checkpoint, of its name in PEFT's model."""
    return name.removeprefix(_PREFIX).replace(_WRAPPED, "").replace(_COPIED, "")


def is_factor(name: str) -> bool:
    """Whether a parameter is a matrix A or B, by its name in PEFT's model."""
    return any(part.startswith("lora_") for part in name.split("."))


def adapters_of(model: nn.Module) -> dict[str, LoraLayer]:
    """PEFT's layers of a model, by their names in it."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def check_adapters(model: PeftModel, *, perturbed: bool) -> None:
    """Raises ``UsageError`` where merged weights would not be the model that PEFT trains.

    Args:
        model: of PEFT, before DeepSpeed wraps it.
        perturbed: whether rollouts are perturbed, so that the input embedding has to be a plain table.
    """
    problems = [*_unmergeable(model), *_of_input_embedding(model, perturbed)]
    _refuse(problems, "name other modules in --ds.lora.target_modules, such as q_proj k_proj v_proj o_proj")


def check_merged_in_place(model: PeftModel, *, perturbed: bool) -> None:
    """As :func:`check_adapters`, where PEFT merges the weights in place before each sync, as TRL has it do.

    A matrix that two modules share is merged wrongly. Without an adapter, the second one gets that of the first, and
    with adapters of both (``ensure_weight_tying``), PEFT 0.21 adds the update twice.
    """
    problems = [*_merged_for_several(model), *_of_input_embedding(model, perturbed)]
    _refuse(problems, "leave these modules out of target_modules and modules_to_save in LoraConfig")


def _refuse(problems: Sequence[tuple[str, str]], fix: str) -> None:
    """Raises ``UsageError`` for problems, each with the name of a module in PEFT's model."""
    if problems:
        lines = [f"  {engine_name(name)}: {why}" for name, why in problems]
        raise UsageError(
            "these adapters cannot be used, because vLLM gets one merged matrix for each module:\n"
            + "\n".join(lines)
            + f"\nFix: {fix}."
        )


def _of_input_embedding(model: PeftModel, perturbed: bool) -> Iterator[tuple[str, str]]:
    """The name of the input embedding and the reason, where it has adapters and rollouts are perturbed."""
    embedding = model.get_input_embeddings()
    for name, adapter in adapters_of(model).items():
        if perturbed and adapter is embedding:
            yield (
                name,
                "it is the input embedding, of which a perturbation mixes rows of one table, as vLLM has it, and PEFT"
                " adds the adapter's part of a row beside the table",
            )


def _names_of_parameters(model: nn.Module) -> Mapping[int, Sequence[str]]:
    """Each parameter's names in the model, by its ``id``: one for each module that has it."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return names


def _merged_for_several(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Matrices that several modules share, where PEFT adapts one of these or trains a copy for only some of them.

    Yields the name of each matrix in its first module, and the reason.
    """
    for names in _names_of_parameters(model).values():
        copied = [name for name in names if _COPIED in name]
        is_partly_copied = 0 < len(copied) < len(names)
        is_adapted = any(_WRAPPED in name for name in names)
        if len(names) > 1 and (is_adapted or is_partly_copied):
            others = " and ".join(engine_name(name) for name in names[1:])
            yield names[0], f"its matrix is also that of {others} (tied embeddings)"


def _unmergeable(model: nn.Module) -> list[tuple[str, str]]:
    """The modules of a PEFT model whose weights :meth:`EngineWeight.merged` would get wrong: name and reason."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    names_of_parameters = _names_of_parameters(model)
    mergeable = _mergeable_kinds()
    problems = []
    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            problems.append((name, "PEFT trains a copy of the module (modules_to_save), which is not merged"))
    for name, adapter in adapters_of(model).items():
        kind = type(adapter).__name__
        if type(adapter) not in mergeable:
            problems.append((name, f"PEFT's {kind} adapts no linear layer or embedding (experts, convolutions)"))
            continue
        if len(adapter.active_adapters) != 1:
            problems.append((name, f"{len(adapter.active_adapters)} adapters are active, and one is merged"))
        for variant in adapter.lora_variant.values():
            problems.append((name, f"{type(variant).__name__} is no sum of the weight and s · B A"))
        if any(adapter.lora_bias.values()):
            problems.append((name, "its adapter has a bias (lora_bias)"))
        if len(names_of_parameters[id(adapter.get_base_layer().weight)]) > 1:
            problems.append((name, "its matrix is also another module's (tied embeddings), which has no adapter"))
    return problems


def _mergeable_kinds() -> tuple[type, ...]:
    """PEFT's kinds of layers whose update is s · B A; PEFT has the one for 4 bits only where bitsandbytes is there."""
    from peft.import_utils import is_bnb_4bit_available
    from peft.tuners.lora.layer import Embedding, Linear

    if not is_bnb_4bit_available():
        return Linear, Embedding
    from peft.tuners.lora.bnb import Linear4bit

    return Linear, Embedding, Linear4bit
