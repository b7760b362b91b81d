# SPDX-License-Identifier: Apache-2.0
"""The script for a GPU: what it does with cases that end well, badly, or not at all. Its stages: tests/stack."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as script
from benchmarks.gpu import training
from benchmarks.gpu.run import Results, run_stage
from benchmarks.gpu.stages import STAGES, Case, stage
from benchmarks.gpu.tables import markdown
from ngrpo.upstream import openrlhf_parser
from perturbations.errors import UsageError

TITLE = "a stage of this test"
MACHINE = {"gpu": None, "processor": "a processor", "cores": 2, "python": "3.11", "versions": {"torch": "2"}}


def cases(rehearse: bool) -> list[Case]:
    """One of each kind; without the rehearsal, what takes too long."""
    if not rehearse:
        return [Case("slow", {"kind": "slow"}), Case("after its time", {"kind": "good"})]
    kinds = ["good", "good, then an error", "one bad row", "killed"]
    needs_more = Case("needs more", {"kind": "good"}, needs={"no_such_module": "docs/install.md"})
    return [*(Case(kind, {"kind": kind}, {"SEEN": kind}) for kind in kinds), needs_more]


def measure(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs in a process of its own."""
    import os

    kind = arguments["kind"]
    yield {"perturbation": kind, "environment": os.environ.get("SEEN")}
    if kind == "good, then an error":
        raise RuntimeError("something is wrong\nwith the device")
    if kind == "one bad row":
        yield {"error": "this engine did not start"}
    if kind == "killed":
        os.kill(os.getpid(), 9)
    if kind == "slow":
        time.sleep(600)


class Told(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, bool]:
    path = tmp_path_factory.mktemp("figures") / "gpu.json"
    results, this = Results(path, MACHINE), sys.modules[__name__]
    good = run_stage("a", this, results, rehearse=True, report=Told())
    run_stage("a", this, results, rehearse=False, minutes=1 / 60, report=Told())
    return json.loads(path.read_text())["a"], path, good


def test_each_case_ends_in_its_own_way_and_the_others_go_on(outcome: tuple) -> None:
    part, _, good = outcome
    assert not good
    assert part["title"] == TITLE
    assert part["machine"] == MACHINE
    states = {name: case["state"] for name, case in part["cases"].items()}
    assert states == {
        "good": "done",
        "good, then an error": "failed",
        "one bad row": "failed",
        "killed": "failed",
        "needs more": "skipped",
        "slow": "failed",
        "after its time": "not run",
    }
    found = part["cases"]
    assert found["good"]["rows"] == [{"perturbation": "good", "environment": "good"}]
    assert found["good"]["commit"] and found["good"]["seconds"] > 0
    assert found["good, then an error"]["error"].endswith("with the device")
    assert len(found["good, then an error"]["rows"]) == 1, "what was there before the error is kept"
    assert found["one bad row"]["error"] == "this engine did not start"
    assert "status -9" in found["killed"]["error"]
    assert "no_such_module is not installed (docs/install.md)" in found["needs more"]["reason"]
    assert "its stage's time" in found["slow"]["error"]


def test_what_is_done_is_not_run_again(outcome: tuple, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(outcome[1].read_text())
    told = Told()
    run_stage("a", sys.modules[__name__], Results(path, MACHINE), rehearse=True, minutes=0.0, report=told)
    assert told[0] == "a  good: done before (--force runs it again)"
    cases = json.loads(path.read_text())["a"]["cases"]
    assert cases["good"] == outcome[0]["cases"]["good"]
    assert cases["killed"]["state"] == "not run"


def test_figures_of_another_machine_do_not_stay_beside_these(outcome: tuple, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(outcome[1].read_text())
    told, other = Told(), {**MACHINE, "cores": 64}
    run_stage("a", sys.modules[__name__], Results(path, other), rehearse=True, minutes=0.0, report=told)
    part = json.loads(path.read_text())["a"]
    assert "another machine" in told[0] and part["machine"] == other
    assert {case["state"] for case in part["cases"].values()} == {"skipped", "not run"}


def test_as_markdown(outcome: tuple) -> None:
    text = markdown({"f": outcome[0]})
    assert f"### (f) {TITLE}" in text and "No GPU: a processor, 2 cores; torch 2." in text
    assert "| – | good | – |" in text, "runner and rate are missing in these rows"
    assert "killed: failed: exit status -9" in text and "Not run: a, b, c, d, e." in text


@pytest.mark.parametrize("letter", STAGES)
@pytest.mark.parametrize("rehearse", [True, False])
def test_cases_are_light_and_have_names_of_their_own(letter: str, rehearse: bool) -> None:
    found = stage(letter).cases(rehearse)
    assert found and len({case.name for case in found}) == len(found)
    assert all(case.missing() == "" for case in found) or not rehearse
    json.dumps([case.arguments for case in found])


@pytest.mark.skipif(find_spec("openrlhf") is None, reason="needs OpenRLHF's own parser")
def test_openrlhf_takes_the_flags_of_the_training() -> None:
    """They have run on no GPU so far: at least OpenRLHF's parser and its conditions are asked."""
    least = ["--actor.model_name_or_path", "m", "--reward.remote_url", "reward.py", "--algo.kl.init_coef", "0"]
    for case in training.cases(False):
        openrlhf_parser.check([*least, *case.arguments["flags"]])
    with pytest.raises(UsageError, match=r"--vllm\.enable_sleep"):
        openrlhf_parser.check([*least, *case.arguments["flags"], "--train.async_enable"])


def test_listing_the_stages_loads_no_engine() -> None:
    code = (
        "import sys; from benchmarks.gpu.stages import STAGES, stage;"
        "[stage(s).cases(False) for s in STAGES]; print([m for m in ('torch', 'vllm', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--stage", "a"], "--rehearse runs everything in miniature on a CPU"),
        (["--stage", "x", "--rehearse"], "'x' is none of a, b, c, d, e, f"),
        (["--print", "--out", "/nowhere/gpu.json"], "/nowhere/gpu.json does not exist"),
    ],
)
def test_bad_words(words: list[str], told: str, capsys: pytest.CaptureFixture) -> None:
    import torch

    if torch.cuda.is_available() and words == ["--stage", "a"]:
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        script.main(words)
    assert told in capsys.readouterr().err
