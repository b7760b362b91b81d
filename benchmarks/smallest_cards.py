# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.smallest_cards``: the table of docs/clusters.md, one GPU for each model, by estimate."""

from ngrpo.commands.doctor import planned_flags
from ngrpo.machine.hardware import gpu_plan, host_plan
from ngrpo.machine.models import architecture
from ngrpo.machine.upstream import placement

CARDS = (16, 24, 32, 40, 48, 80, 96, 141, 180)  # GB
LENGTHS = (2048, 8192)
_OFFLOAD = "--ds.adam_offload"


def smallest(model: str, length: int, *, offload: bool) -> str:
    """The smallest of CARDS on which the default placement fits, or a dash; with the host's GiB where it offloads."""
    for gigabytes in CARDS:
        machine = placement.planned(f"1x{gigabytes}", "--dry-run")
        flags = planned_flags(model, machine, "--data.max_len", str(length), *[_OFFLOAD] * offload)
        args = flags.args
        if flags.has(_OFFLOAD) is offload and gpu_plan.fits(args, machine.memory):
            host = host_plan.host_bytes(args, machine.memory) / placement.GIB
            return f"{gigabytes} GB" + f", host {host:.0f} GiB" * offload
    return "–"


def table() -> str:
    """The models by size, for responses with their prompts of each of LENGTHS."""
    sizes = architecture.size_table()
    lines = ["| model | " + " | ".join(f"{length:,} tokens | with `{_OFFLOAD}`" for length in LENGTHS) + " |"]
    lines.append("| --- " * (1 + 2 * len(LENGTHS)) + "|")
    for model in sorted(sizes, key=lambda name: sizes[name]["parameters"]):
        cells = [smallest(model, length, offload=offload) for length in LENGTHS for offload in (False, True)]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
