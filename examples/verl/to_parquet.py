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
    if any(problem.get("tools") for problem in problems):
        raise SystemExit(
            f"{path}: its rows have tools, and verl shows a prompt none. Write them into a system message."
        )
    verl_rows = []
    for index, problem in enumerate(problems):
        messages = problem["input"]
        if not isinstance(messages, list):
            messages = [{"role": "user", "content": messages}]
        verl_rows.append(
            {
                "prompt": messages,
                "data_source": path.stem,
                "reward_model": {"style": "rule", "ground_truth": str(problem["label"])},
                "extra_info": {"index": index},
            }
        )
    return verl_rows


if __name__ == "__main__":
    pandas.DataFrame(rows(Path(sys.argv[1]))).to_parquet(sys.argv[2])
