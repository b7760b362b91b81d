# SPDX-License-Identifier: Apache-2.0
"""The script that tries releases of vLLM: what it would run exists, and the docs have its table."""

import json
import re
from pathlib import Path

from benchmarks import matrix
from ngrpo.machine.upstream import versions

ROOT = Path(__file__).resolve().parents[3]


def test_every_supported_release_is_in_it() -> None:
    first, last = (int(end.removeprefix("0.")) for end in versions.VLLM.split(" to "))
    minors = sorted(int(release.split(".")[1]) for release in matrix.RELEASES)
    assert minors == list(range(first, last + 1))
    assert all(map(versions.is_supported_vllm, matrix.RELEASES))
    assert versions.VLLM_OF_MAKE in matrix.RELEASES


def test_later_releases_are_for_rollouts_only() -> None:
    last = int(versions.VLLM.rpartition("0.")[2])
    last_of_rollouts = int(versions.VLLM_OF_ROLLOUTS.rpartition(".")[2])
    later = [f"0.{minor}.0" for minor in range(last + 1, last_of_rollouts + 1)]
    assert set(later) == set(matrix.ROLLOUT_ONLY)
    assert all(map(versions.has_rollouts, later))
    assert not any(map(versions.is_supported_vllm, later))
    assert not versions.has_rollouts("0.34.0")


def test_the_docs_have_its_table() -> None:
    results = json.loads(matrix.RESULT.read_text())
    assert set(results) <= {*matrix.RELEASES, *matrix.ROLLOUT_ONLY}
    text = (ROOT / "docs" / "install.md").read_text()
    assert matrix.table(results) in text
    shown = re.findall(r"^\| (0\.\d+\.\d+) \|", text, re.MULTILINE)
    assert set(shown) == set(results)
