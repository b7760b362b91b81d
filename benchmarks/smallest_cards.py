# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.smallest_cards``: the tables of docs/clusters.md, one GPU for each model, by estimate."""

from collections.abc import Sequence

from benchmarks.markdown import table_lines
from ngrpo.commands.doctor import planned_flags
from ngrpo.machine.hardware import gpu_plan, host_plan
from ngrpo.machine.models import architecture
from ngrpo.machine.upstream import placement

CARDS = (16, 24, 32, 40, 48, 80, 96, 141, 180)  # GB
LENGTHS = (2048, 8192)
LORA = ("--ds.lora.rank", "16")
QLORA = (*LORA, "--ds.load_in_4bit")
NO_REFERENCE = ("--algo.kl.init_coef", "0")
_OFFLOAD = "--ds.adam_offload"


def smallest(model: str, length: int, *words: str, offload: bool) -> str:
    """The smallest of CARDS on which the default placement fits, or a dash; with the host's GiB where it offloads.

    ``words``: further flags of the training.
    """
    flags_of_offload = [_OFFLOAD] if offload else []
    for gigabytes in CARDS:
        machine = placement.planned(f"1x{gigabytes}", "--dry-run")
        flags = planned_flags(model, machine, "--data.max_len", str(length), *words, *flags_of_offload)
        args = flags.args
        if flags.has(_OFFLOAD) is not offload or not gpu_plan.fits(args, machine.memory):
            continue
        if not offload:
            return f"{gigabytes} GB"
        host_gib = host_plan.host_bytes(args, machine.memory) / placement.GIB
        return f"{gigabytes} GB, host {host_gib:.0f} GiB"
    return "–"


def plain_cells(model: str) -> list[str]:
    """The cards of a training of all weights, without and with the offload, for each of LENGTHS."""
    cells = []
    for length in LENGTHS:
        cells.append(smallest(model, length, offload=False))
        cells.append(smallest(model, length, offload=True))
    return cells


def adapter_cells(model: str, words: Sequence[str]) -> list[str]:
    """The cards of a training with LORA or QLORA, with a reference model and without one, for each of LENGTHS."""
    cells = []
    for length in LENGTHS:
        cells.append(smallest(model, length, *words, offload=False))
        cells.append(smallest(model, length, *words, *NO_REFERENCE, offload=False))
    return cells


def table() -> str:
    """The models by size, for responses with their prompts of each of LENGTHS."""
    rows = {model: plain_cells(model) for model in by_size()}
    return _markdown(f"with `{_OFFLOAD}`", rows)


def adapter_table(name: str, words: Sequence[str]) -> str:
    """The models by size, with adapters of rank 16 on all linear layers; ``name`` is what the rows call them."""
    rows = {f"{model} with {name}": adapter_cells(model, words) for model in by_size()}
    return _markdown("without a reference", rows)


def _markdown(second_heading: str, rows: dict[str, list[str]]) -> str:
    """A table with two columns for each of LENGTHS."""
    head = ["model"]
    for length in LENGTHS:
        head += [f"{length:,} tokens", second_heading]
    return "\n".join(table_lines(head, [[name, *cells] for name, cells in rows.items()]))


def by_size() -> list[str]:
    """The models whose sizes the project knows, the smallest first."""
    sizes = architecture.size_table()
    return sorted(sizes, key=lambda name: sizes[name]["parameters"])


if __name__ == "__main__":
    print(table())
    print()
    print(adapter_table("LoRA", LORA))
    print()
    print(adapter_table("QLoRA", QLORA))
