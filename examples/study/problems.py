# SPDX-License-Identifier: Apache-2.0
"""Problems of reasoning-gym, made small enough for a 135M model, as files for `--task math:FILE`.

    python examples/study/problems.py NAME FOLDER [HELD_OUT]

Writes FOLDER/NAME-train.jsonl and FOLDER/NAME-eval.jsonl with the columns `input` and `label`. No question is in both;
16 are held out, or HELD_OUT. The generators' own difficulties are out of reach: with them and the answer's form of
`--task reasoning_gym:NAME`, none of 16 responses of the untrained model is right (docs/studies/study.md).
"""

from __future__ import annotations

import argparse
import json
from itertools import cycle, islice
from pathlib import Path
from typing import Any

EVAL_ROWS = 16
TRAIN_ROWS = 1024
DATASETS: dict[str, tuple[str, dict[str, Any]]] = {
    "sum3": ("chain_sum", {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
    "chain2": ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    "products": ("products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
    "products2": ("products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    "gcd": ("gcd", {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 40}),
    "basic3": ("basic_arithmetic", {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
    "basic": ("basic_arithmetic", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
    "letters": ("letter_counting", {"min_words": 1, "max_words": 2}),
}


def problems(name: str, held_out_rows: int = EVAL_ROWS) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and held-out rows, the same on every machine."""
    import reasoning_gym

    dataset, options = DATASETS[name]

    def rows(seed: int, size: int) -> dict[str, dict[str, str]]:
        row_by_question: dict[str, dict[str, str]] = {}
        for entry in reasoning_gym.create_dataset(dataset, seed=seed, size=size, **options):
            question = f"{entry['question'].strip()} Answer briefly."
            row_by_question.setdefault(question, {"input": question, "label": str(entry["answer"])})
        return row_by_question

    held_out = dict(list(rows(0, 60).items())[:held_out_rows])
    different = [row for question, row in rows(1, TRAIN_ROWS).items() if question not in held_out]
    # Few different questions are left where numbers are small; they come again, as those of the sums do.
    train = list(islice(cycle(different), TRAIN_ROWS))
    return train, list(held_out.values())


def main(name: str, folder: Path, held_out_rows: int) -> None:
    """Writes both files."""
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = problems(name, held_out_rows)
    for split, rows in (("train", train), ("eval", held_out)):
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}-{split}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=DATASETS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("held_out", type=int, nargs="?", default=EVAL_ROWS, help="rows that are not trained on")
    options = parser.parse_args()
    main(options.name, options.folder, options.held_out)
