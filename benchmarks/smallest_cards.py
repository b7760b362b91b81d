# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.smallest_cards``: the tables of docs/clusters.md, one GPU for each model, by estimate."""

from ngrpo.commands.doctor import planned_flags
from ngrpo.machine.hardware import gpu_plan, host_plan
from ngrpo.machine.models import architecture
from ngrpo.machine.upstream import placement

CARDS = (16, 24, 32, 40, 48, 80, 96, 141, 180)  # GB
LENGTHS = (2048, 8192)
_OFFLOAD = "--ds.adam_offload"
LORA = ("--ds.lora.rank", "16")
NO_REFERENCE = ("--algo.kl.init_coef", "0")


def smallest(model: str, length: int, *words: str, offload: bool) -> str:
    """The smallest of CARDS on which the default placement fits, or a dash; with the host's GiB where it offloads.

    ``words``: further flags of the training.
    """
    for gigabytes in CARDS:
        machine = placement.planned(f"1x{gigabytes}", "--dry-run")
        flags = planned_flags(model, machine, "--data.max_len", str(length), *words, *[_OFFLOAD] * offload)
        args = flags.args
        if flags.has(_OFFLOAD) is offload and gpu_plan.fits(args, machine.memory):
            host = host_plan.host_bytes(args, machine.memory) / placement.GIB
            return f"{gigabytes} GB" + f", host {host:.0f} GiB" * offload
    return "–"


def table() -> str:
    """The models by size, for responses with their prompts of each of LENGTHS."""
    lines = ["| model | " + " | ".join(f"{length:,} tokens | with `{_OFFLOAD}`" for length in LENGTHS) + " |"]
    lines.append("| --- " * (1 + 2 * len(LENGTHS)) + "|")
    for model in by_size():
        cells = [smallest(model, length, offload=offload) for length in LENGTHS for offload in (False, True)]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def lora_cells(model: str) -> list[str]:
    """The cards of a training with LoRA, with a reference model and without one, for each of LENGTHS."""
    cells = []
    for length in LENGTHS:
        cells += [smallest(model, length, *LORA, offload=False)]
        cells += [smallest(model, length, *LORA, *NO_REFERENCE, offload=False)]
    return cells


def lora_table() -> str:
    """The models by size, with adapters of rank 16 on all linear layers."""
    lines = ["| model | " + " | ".join(f"{length:,} tokens | without a reference" for length in LENGTHS) + " |"]
    lines.append("| --- " * (1 + 2 * len(LENGTHS)) + "|")
    lines += [f"| {model} with LoRA | {' | '.join(lora_cells(model))} |" for model in by_size()]
    return "\n".join(lines)


def by_size() -> list[str]:
    """The models whose sizes the project knows, the smallest first."""
    sizes = architecture.size_table()
    return sorted(sizes, key=lambda name: sizes[name]["parameters"])


if __name__ == "__main__":
    print(table())
    print()
    print(lora_table())
