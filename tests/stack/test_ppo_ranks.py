# SPDX-License-Identifier: Apache-2.0
"""Which numbers of answers OpenRLHF 0.11.2 can train on with several ranks; the others hang, or shift the updates.

The start-up rule (`ngrpo/config/batch_check.py`) says the same of each.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ngrpo.config import batch_check
from ngrpo.machine.upstream import openrlhf_parser
from tests.own_process import RESULT
from tests.stack.ppo_ranks import arguments
from tests.tiny_folder import tiny_folder
from tests.two_ranks import run_two_ranks

HANGS = "Timed out waiting"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> str:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return tiny_folder(tmp_path_factory.mktemp("tiny"), smollm2, "llama", **sizes)


def trained(folder: str, ranks: int, micro: int, *cases: str) -> dict[str, list[Any]]:
    """What each rank did with so many answers, in micro batches of so many in the rollout.

    A list of its micro batches, each with its answers and its updates; or how it ended. Batches of 8 make an update.
    """
    words = (str(ranks), folder, "8", str(micro), *cases)
    outputs = run_two_ranks("tests.stack.ppo_ranks", *words, ranks=ranks)
    lines = [next(line for line in output.splitlines() if line.startswith(RESULT)) for output in outputs]
    steps = zip(*(json.loads(line.removeprefix(RESULT)) for line in lines))
    flags = (arguments(folder, ranks, 8, micro, int(case.partition(":")[2])) for case in cases)
    counts = (int(case.partition(":")[0]) for case in cases)
    rule = [
        batch_check.trains_on_all_ranks(openrlhf_parser.resolved(each), count) for each, count in zip(flags, counts)
    ]
    steps = list(steps)
    assert rule == [not any(rank["end"] for rank in step) for step in steps]
    ends = ([rank["end"] or rank["trained"] for rank in step] for step in steps)
    return {f"{at}: {case}": end for at, (case, end) in enumerate(zip(cases, ends))}


ONE, UPDATE = [1, 0], [1, 1]


def test_micro_batches_of_one_on_two_ranks(folder: str) -> None:
    seen = trained(folder, 2, 1, "8:1", "8:4", "1:1", "6:1", "8:1", "7:1")
    whole = [ONE, ONE, ONE, UPDATE]
    assert seen["0: 8:1"] == seen["1: 8:4"] == [whole, whole]
    assert all("Insufficient batch size" in end for end in seen["2: 1:1"]), "an answer is missing for a rank"
    assert seen["3: 6:1"] == [[ONE] * 3] * 2, "both ranks have as many, but none of them is an update"
    assert seen["4: 8:1"] == [[UPDATE, ONE, ONE, ONE]] * 2, "what was left joins the next step's, which it shifts"
    first, second = seen["5: 7:1"]
    assert HANGS in first and second == [UPDATE, ONE, ONE], "four answers and three: the first rank waits for ever"


@pytest.mark.slow
def test_micro_batches_of_two_on_two_ranks(folder: str) -> None:
    """An answer that fills no micro batch is dropped without a word."""
    seen = trained(folder, 2, 2, "8:1", "6:1", "5:1", "7:1")
    assert seen["0: 8:1"] == [[[2, 0], [2, 1]]] * 2
    assert seen["1: 6:1"] == [[[2, 0]]] * 2, "of three answers a rank trains on two"
    assert seen["2: 5:1"] == [[[2, 1]]] * 2, "three answers and two: one micro batch each"
    assert any(HANGS in str(end) for end in seen["3: 7:1"]), "four answers and three: two micro batches, and one"


@pytest.mark.slow
@pytest.mark.parametrize("count", [9, 10])
def test_four_ranks(folder: str, count: int) -> None:
    """Each rank but the last ones gets the larger share: 3, 3, 3 and 0 of nine answers, and not 3, 2, 2 and 2."""
    seen = trained(folder, 4, 1, "8:1", "8:3", f"{count}:1")
    assert seen["0: 8:1"] == [[ONE, UPDATE]] * 4
    assert all("Insufficient batch size" in end for end in seen["1: 8:3"]), "three micro batches for four ranks"
    assert any(HANGS in str(end) for end in seen[f"2: {count}:1"])
