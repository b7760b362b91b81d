# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.qlora_cards``: QLoRA's table of docs/clusters.md, one GPU for each model, by estimate."""

from benchmarks.smallest_cards import LENGTHS, LORA, NO_REFERENCE, by_size, smallest

QLORA = (*LORA, "--ds.load_in_4bit")


def cells(model: str) -> list[str]:
    """The smallest cards with a reference model and without one, for each of LENGTHS."""
    cards = []
    for length in LENGTHS:
        cards.append(smallest(model, length, *QLORA, offload=False))
        cards.append(smallest(model, length, *QLORA, *NO_REFERENCE, offload=False))
    return cards


def table() -> str:
    """The models by size, with adapters of rank 16 on all linear layers, which are stored in 4 bits."""
    headings = [f"{length:,} tokens | without a reference" for length in LENGTHS]
    lines = [f"| model | {' | '.join(headings)} |", "| --- " * (1 + 2 * len(LENGTHS)) + "|"]
    lines += [f"| {model} with QLoRA | {' | '.join(cells(model))} |" for model in by_size()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
