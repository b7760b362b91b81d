# SPDX-License-Identifier: Apache-2.0
"""The answers to "Where is …?" in docs/architecture.md are the only places where these things are done."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROLLOUTS_AND_TRAINING = ("ngrpo/rollout", "ngrpo/trainers", "perturbations")
# What is done in a home, as its source says it, and the few other files in these folders where the same words stand:
# the hash that all seeds are made by, a second round's own bytes, a further gate asked by the default one and by the
# conformance suite.
DONE_AT_HOME = {
    "perturbations/seeds.py": (r"\bblake2b\(digest_size=SEED_BYTES\)|def of_(engine|prompt)\(", set()),
    "perturbations/replay/packing.py": (r"def (un)?sealed\(", set()),
    "ngrpo/trainers/openrlhf/actor_trainer.py": (r"\bactor_loss_fn\b.*=", set()),
    "ngrpo/trainers/common/log_probs.py": (r"\boriginal\(logits, labels", set()),
    "ngrpo/rollout/async_scheduling.py": (r"\.synchronize\(\)", set()),
    "ngrpo/rollout/records.py": (r"num_output_tokens\(\)", set()),
    "perturbations/gates/default.py": (
        r"\bgate\.(open|feeds|selects)\(|def verdict\(",
        {"perturbations/testing/proposal.py"},
    ),
    "ngrpo/trainers/openrlhf/trainer.py": (r"def evaluate\(", set()),
    "ngrpo/rollout/attach.py": (r"\.(load_weights|reload_weights) = ", set()),
}


def test_the_page_names_a_file_for_each_question() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("## Where is …?")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) == 6
    named = {name for row in rows for name in re.findall(r"`([^`]+\.py)`", row)}
    assert named == DONE_AT_HOME.keys()
    assert not [name for name in re.findall(r"`([^`]+\.py)`", section) if not (ROOT / name).is_file()]


@pytest.mark.parametrize("home", DONE_AT_HOME)
def test_it_is_done_there_and_nowhere_else(home: str) -> None:
    pattern, others = DONE_AT_HOME[home]
    found = {
        str(path.relative_to(ROOT))
        for folder in ROLLOUTS_AND_TRAINING
        for path in (ROOT / folder).rglob("*.py")
        if re.search(pattern, path.read_text(encoding="utf-8"))
    }
    assert found == {home, *others}
