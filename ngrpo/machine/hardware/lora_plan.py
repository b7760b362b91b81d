# SPDX-License-Identifier: Apache-2.0
"""How many parameters a run trains: all of a model's, or those of LoRA's adapters."""

from ngrpo.machine.models.architecture import ModelSize
from ngrpo.machine.upstream.placement import Args


def adapter_parameters(size: ModelSize, args: Args) -> int:
    """The parameters of A and B of all adapters: rank × (inputs + outputs) for each adapted linear layer.

    A module whose name is not one of Llama's counts as all of them, so that the estimate is too large rather than too
    small. Of a mixture of experts, whose experts get no adapters, it is too large as well.
    """
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    widths = {
        "q_proj": size.hidden + queries,
        "k_proj": size.hidden + keys,
        "v_proj": size.hidden + keys,
        "o_proj": queries + size.hidden,
        "gate_proj": size.hidden + size.intermediate,
        "up_proj": size.hidden + size.intermediate,
        "down_proj": size.intermediate + size.hidden,
    }
    modules = args["ds.lora.target_modules"]
    # OpenRLHF's default is no list, but the word "all-linear".
    if not isinstance(modules, str) and all(module in widths for module in modules):
        widths = {module: widths[module] for module in modules}
    return size.layers * args["ds.lora.rank"] * sum(widths.values())


def trained_parameters(size: ModelSize, args: Args) -> int:
    """The parameters of a model that get gradients and optimizer states."""
    return adapter_parameters(size, args) if args["ds.lora.rank"] else size.parameters
