# SPDX-License-Identifier: Apache-2.0
"""Problems of `ngrpo data` in verl's layout: python examples/verl/to_parquet.py IN.jsonl OUT.parquet"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas


def rows(path: Path) -> list[dict]:
    """One row for each line with ``input`` and ``label``."""
    with path.open(encoding="utf-8") as lines:  # str.splitlines() would split at characters such as U+2028, too
        problems = [json.loads(line) for line in lines]
    if any(one.get("tools") for one in problems):
        raise SystemExit(
            f"{path}: its rows have tools, and verl shows a prompt none. Write them into a system message."
        )
    return [
        {
            "prompt": one["input"] if isinstance(one["input"], list) else [{"role": "user", "content": one["input"]}],
            "data_source": path.stem,
            "reward_model": {"style": "rule", "ground_truth": str(one["label"])},
            "extra_info": {"index": index},
        }
        for index, one in enumerate(problems)
    ]


if __name__ == "__main__":
    pandas.DataFrame(rows(Path(sys.argv[1]))).to_parquet(sys.argv[2])
