# SPDX-License-Identifier: Apache-2.0
"""How many parameters a run trains, all of a model's or those of LoRA's adapters, and the bytes of the frozen ones."""

from ngrpo.machine.models.architecture import ModelSize
from ngrpo.machine.upstream.placement import Args

BYTES_OF_FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)
"""A weight of bitsandbytes: 4 bits, a scale of 8 bits for 64 weights, and a float32 scale for 256 of these scales."""


def adapter_parameters(size: ModelSize, args: Args) -> int:
    """The parameters of A and B of all adapters: rank × (inputs + outputs) for each adapted linear layer.

    A module whose name is not one of Llama's counts as all of them, so that the estimate is too large rather than too
    small. Of a mixture of experts, whose experts get no adapters, it is too large as well.
    """
    widths = {module: inputs + outputs for module, (inputs, outputs) in _linear_layers(size).items()}
    modules = args["ds.lora.target_modules"]
    # OpenRLHF's default is no list, but the word "all-linear".
    if not isinstance(modules, str) and all(module in widths for module in modules):
        widths = {module: widths[module] for module in modules}
    return size.layers * args["ds.lora.rank"] * sum(widths.values())


def trained_parameters(size: ModelSize, args: Args) -> int:
    """The parameters of a model that get gradients and optimizer states."""
    return adapter_parameters(size, args) if args["ds.lora.rank"] else size.parameters


def weight_bytes(size: ModelSize, args: Args) -> float:
    """The bytes of a model's own weights, without adapters, in bfloat16 or in 4 bits (``--ds.load_in_4bit``).

    bitsandbytes quantises linear layers other than the head; of a mixture, whose experts are no linear layers in
    transformers 5, the attention's alone.
    """
    if not args["ds.load_in_4bit"]:
        return 2.0 * size.parameters
    quantised = four_bit_parameters(size)
    return BYTES_OF_FOUR_BIT * quantised + 2.0 * (size.parameters - quantised)


def four_bit_parameters(size: ModelSize) -> int:
    """Q: the parameters of a model that QLoRA stores in 4 bits."""
    layers = _linear_layers(size)
    if size.has_experts:
        layers = {module: layers[module] for module in ("q_proj", "k_proj", "v_proj", "o_proj")}
    return size.layers * sum(inputs * outputs for inputs, outputs in layers.values())


def _linear_layers(size: ModelSize) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the linear layers of a block, by Llama's names."""
    queries = size.heads * size.head_dim
    keys = size.kv_heads * size.head_dim
    return {
        "q_proj": (size.hidden, queries),
        "k_proj": (size.hidden, keys),
        "v_proj": (size.hidden, keys),
        "o_proj": (queries, size.hidden),
        "gate_proj": (size.hidden, size.intermediate),
        "up_proj": (size.hidden, size.intermediate),
        "down_proj": (size.intermediate, size.hidden),
    }
