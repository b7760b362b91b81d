# SPDX-License-Identifier: Apache-2.0
"""A reward by number: half the answers to a problem are right, whatever they say; none where it cannot be solved.

DAPO's filter keeps the former problems and replaces the latter. Each engine that asks leaves a file beside this one.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

_earlier_answers: defaultdict[str, count] = defaultdict(count)
"""By prompt, how many answers to it were rewarded before."""


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: Any) -> dict[str, Any]:
    """OpenRLHF asks for one answer at a time, in the process of the engine that gave it."""
    Path(__file__).with_name(f"engine-{os.getpid()}").touch()
    reward = 0.0
    if labels[0] != "no answer" and next(_earlier_answers[prompts[0]]) % 2 == 0:
        reward = 1.0
    return {"rewards": reward, "scores": reward}
