# SPDX-License-Identifier: Apache-2.0
"""The script for a GPU: what it does with stages that end well, badly, or not at all. Its stages: tests/stack."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.gpu import decode_steps, exactness, first_step, models, run, throughput, trainer_step, training
from benchmarks.gpu.stages import Stage, stages
from ngrpo.config import parse
from ngrpo.config.complete_run import CompleteRun
from ngrpo.machine.upstream import placement
from ngrpo.machine.upstream.openrlhf_flags import Flags
from perturbations.errors import UsageError
from tests.support import gpu_stage
from tests.support.own_process import ends

MACHINE = {"gpu": None, "processor": "a processor", "cores": 2, "python": "3.11", "versions": {"torch": "2"}}
HERE = "no GPU, a processor"


def stage(kind: str, seconds: float = 5.0, **fields: Any) -> Stage:
    defaults = {"arguments": {"kind": kind}, "env": {"SEEN": kind}, "needs": ()}
    return Stage(f"test-{kind}", gpu_stage.__name__, seconds, f"what is {kind}", **{**defaults, **fields})


class Outcome(NamedTuple):
    """What a call did.

    Attributes:
        good: whether all stages were.
        lines: what was reported.
        figures: the content of the file of figures.
        path: of that file.
    """

    good: bool
    lines: list[str]
    figures: dict[str, Any]
    path: Path


def go(path: Path, *stages: Stage, limit: float = 300.0, machine: dict[str, Any] = MACHINE) -> Outcome:
    """Runs stages."""
    lines: list[str] = []
    good = run.run(stages, path, machine, limit=limit, report=lines.append)
    figures = json.loads(path.read_text()) if path.exists() else {}
    return Outcome(good, lines, figures, path)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    path = tmp_path_factory.mktemp("figures") / "gpu.json"
    return go(
        path,
        stage("error"),
        stage("bad row"),
        stage("killed"),
        stage("good"),
        stage("wrong"),
        stage("absent", needs=("no_such_module",)),
        stage("two", gpus=2),
        stage("long", 1000.0),
        stage("slow", 0.2),
    )


def test_each_stage_ends_in_its_own_way_and_the_others_go_on(outcome: Outcome) -> None:
    assert not outcome.good
    figures = outcome.figures
    assert {name: stage_figures["state"] for name, stage_figures in figures.items()} == {
        "test-good": "done",
        "test-wrong": "done",
        "test-error": "failed",
        "test-bad row": "failed",
        "test-killed": "failed",
        "test-slow": "failed",
    }
    good = figures["test-good"]
    assert good["rows"][0]["environment"] == "good"
    assert good["gpu"] == HERE
    assert good["good"]
    assert good["commit"]
    assert good["seconds"] > 0
    assert not figures["test-wrong"]["good"]
    assert figures["test-error"]["verdict"] == "failed: with the device"
    assert len(figures["test-error"]["rows"]) == 1, "what was there before the error is kept"
    assert figures["test-bad row"]["verdict"] == "failed: this engine did not start"
    assert "exit status -9" in figures["test-killed"]["verdict"]
    assert figures["test-slow"]["verdict"].startswith("cut off after"), "ten times its estimate"
    lines = "\n".join(outcome.lines)
    assert f"{HERE}  test-good: 1 rows (" in lines
    assert f"{HERE}  test-absent: skipped: no_such_module not installed" in lines
    assert f"{HERE}  test-two: skipped: needs 2 GPUs, there is 1" in lines
    assert f"{HERE}  test-long: not started: it takes about 1000 s, " in lines
    assert outcome.lines[-1] == "left for the next call: test-long"


def test_a_later_call_leaves_what_is_done_and_puts_failures_last(
    outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(outcome.path.read_text())
    later = go(path, stage("error"), stage("good"), stage("fresh"))
    assert not later.good
    names = [line.split(": ")[0].split("  ")[1] for line in later.lines]
    assert names == ["test-good", "test-fresh", "test-error"]
    assert later.lines[0] == f"{HERE}  test-good: done before: 1 rows"
    assert later.figures["test-good"] == outcome.figures["test-good"]
    on_another = go(path, stage("good"), machine={**MACHINE, "processor": "another"})
    assert "done before" not in on_another.lines[0]
    monkeypatch.setattr(run, "_sources", lambda: "0")
    with_other_sources = go(path, stage("good"))
    assert "done before" not in with_other_sources.lines[0], "figures of other sources are replaced"


@pytest.mark.more
def test_a_killed_run_ends_its_stage_and_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    code = "from pathlib import Path; from tests.fast.benchmarks.test_gpu_script import go, stage;"
    code += f"go(Path({str(path)!r}), stage('good'), stage('slow', 20.0))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=run.ROOT) as process:
        while not (path.exists() and "test-slow" in path.read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        process.kill()
    figures = json.loads(path.read_text())
    assert ends(figures["test-slow"]["rows"][0]["pid"]), "the stage continues without its parent"
    quick = replace(stage("slow"), arguments={"kind": "good"})
    resumed = go(path, stage("good"), quick)
    assert resumed.lines[0] == f"{HERE}  test-good: done before: 1 rows"
    assert resumed.figures["test-slow"]["state"] == "done"


def test_a_second_call_beside_the_first_is_refused() -> None:
    refusal = r"another call of benchmarks\.gpu is running in .* Wait until it has ended"
    with run.alone(), pytest.raises(UsageError, match=refusal), run.alone():
        pass
    with run.alone():
        pass


def test_stages_have_names_of_their_own_and_the_rehearsal_runs_every_module() -> None:
    full = stages(False)
    rehearsal = stages(True)
    for selection in (full, rehearsal):
        assert len({one.name for one in selection}) == len(selection)
        json.dumps([one.arguments for one in selection])
    assert {one.module for one in full} == {one.module for one in rehearsal}


def test_half_an_hour_in_calls_of_ten_minutes_has_what_matters_most_first() -> None:
    """A call skips what does not fit its time, so that a bad estimate would let a lesser stage go first."""
    open_stages = [one for one in stages(False) if one.gpus == 1]
    calls = []
    while open_stages:
        seconds_left = 600.0 - run._GRACE
        started = []
        for one in open_stages:
            if one.seconds <= seconds_left:
                started.append(one)
                seconds_left -= one.seconds
        assert started, f"no call of ten minutes has time for {open_stages[0].name}"
        open_stages = [one for one in open_stages if one not in started]
        calls.append([one.name for one in started])
    assert calls[0][:3] == ["first-step", "first-step-offload", "training"]
    assert calls[1][:2] == ["throughput", "exact-graphs-bfloat16"]
    assert calls[2][0] == "exact-graphs-float32"


def test_the_first_steps_need_no_vllm() -> None:
    for rehearse in (True, False):
        names = [one.name for one in stages(rehearse)]
        assert names[:3] == ["first-step", "first-step-offload", "training"]
        assert all("vllm" not in one.needs for one in stages(rehearse)[:2])


ROW = {"perturbation": "gumbel", "rate": 1.0, "tokens": 10, "mean": 1e-3, "max": 1e-2, "edits": 3}
STEP = {"step": 1, "reward": 0.5, "shift": 0.2, "gap_perturbed_mean": 1e-3, "gap_plain_mean": 1e-3, "step_seconds": 1.0}
COUNT = {"runner": "no engine", "perturbation": "gumbel", "launches": 9, "waits": 0, "loops": 0, "microseconds": 1.0}
LOSS = {"layout": "padded", "record": "a", "ratio": 1.0, "plain_s": 1.0, "loss": 2.0}
UPDATE = {"milliseconds": 90.0, "gradient_norm": 1.0, "moved": 0.9, "shift": 0.5, "device_gib": 8.0, "host_gib": 2.0}
FIRST_STEPS = [
    {"part": "start", "adam": "FusedAdam", "device_gib": 1.0, "host_gib": 1.0},
    {**UPDATE, "part": "update 1"},
    {"part": "checkpoint saved", "milliseconds": 2000.0, "checkpoint_gib": 7.0, "device_gib": 1.0, "host_gib": 2.0},
    {**UPDATE, "part": "update 2"},
    {"part": "checkpoint loaded", "not_restored": 0.0, "device_gib": 1.0, "host_gib": 2.0},
    {**UPDATE, "part": "update 2 again", "repetition": 0.0},
]
SPEED = {"perturbation": "gumbel", "rate": 1.0, "sequences": 64, "ratio": 0.98, "stock": 5000.0}


@pytest.mark.parametrize(
    ("module", "rows", "good", "beginning"),
    [
        (exactness, [{**ROW, "perturbation": "(off)"}, {**ROW, "mean": 3e-3}], False, "NOT EXACT: gumbel 1; "),
        (training, [STEP, {**STEP, "gap_perturbed_mean": 3e-3}], False, "NOT EXACT; 2 steps"),
        (decode_steps, [{**COUNT, "waits": 1}], False, "WAITS OR LOOPS; "),
        (trainer_step, [LOSS, {**LOSS, "loss": 3.0}], False, "LOSSES DIFFER"),
        (throughput, [SPEED, {**SPEED, "ratio": 0.9}], True, "BELOW 0.97 of stock; ratio 0.900"),
    ],
)
def test_verdicts(module: Any, rows: list[dict[str, Any]], good: bool, beginning: str) -> None:
    is_good, verdict = module.judge(rows)
    assert is_good == good
    assert verdict.startswith(beginning)


@pytest.mark.parametrize(
    ("row", "changed", "beginning"),
    [
        (1, {"gradient_norm": float("nan")}, "NOT TRAINED: gradient norm nan in update 1; "),
        (1, {"gradient_norm": 0.0}, "NOT TRAINED: gradient norm 0.0 in update 1; "),
        (3, {"moved": 0.0}, "NOT TRAINED: no weight moved in update 2; "),
        (3, {"shift": 0.0}, "NOT TRAINED: nothing was replayed in update 2; "),
        (4, {"not_restored": 0.5}, "NOT TRAINED: 50.00% of the loaded weights are not the saved ones; "),
        (5, {"repetition": 0.3}, "NOT TRAINED: update 2 again is 0.3 of a step off; "),
        (0, {}, "trained; FusedAdam, gradient norms 1, 1, 1, an update 90 ms, 8.0 GiB of the device, checkpoint 7 GiB"),
    ],
)
def test_verdicts_of_the_first_steps(row: int, changed: dict[str, float], beginning: str) -> None:
    rows = [dict(figures) for figures in FIRST_STEPS]
    rows[row].update(changed)
    is_good, verdict = first_step.judge(rows)
    assert is_good == (not changed)
    assert verdict.startswith(beginning)


@pytest.mark.skipif(find_spec("openrlhf") is None, reason="needs OpenRLHF's own parser")
def test_openrlhf_takes_the_flags_of_the_trainings(tmp_path: Path) -> None:
    """They have run on no GPU: OpenRLHF's parser and its conditions are asked, with the default placement beside."""
    hybrid = ["--train.colocate_all", "--vllm.enable_sleep", "--actor.num_gpus_per_node", "1"]
    hybrid += ["--vllm.num_engines", "1", "--ref.num_gpus_per_node", "1"]
    ours = ("--hardware", "--perturbation", "--perturbation.rate", "--run-dir", "--log-file", "--model")
    for one in stages(False):
        if one.module != "training":
            continue
        words = training.flags({**one.arguments, "model": "m"}, tmp_path, "m")
        assert words[:4] == ["--hardware", "cuda", "--perturbation", "neighbor"]
        theirs = []
        for flag, value in zip(words[::2], words[1::2]):
            if flag not in ours:
                theirs += [flag, value]
        args = Flags(["--actor.model_name_or_path", "m", *theirs, *hybrid]).args
        assert args["algo.kl.init_coef"] > 0, "else there is no reference model"
        assert args["ckpt.save_steps"] == one.arguments["steps"]


def test_the_first_steps_have_the_plan_of_a_training_on_a_gpu() -> None:
    """The default placement there moves states to the host between updates; each stage decides on the offload."""
    model = models.made("tiny", weights=False)
    for one in stages(False):
        if one.module != "first_step":
            continue
        run_config = parse.run_config(first_step.words(dict(one.arguments), model))
        for gigabytes in (24, 80):
            on_a_gpu = replace(run_config, machine=placement.Machine((1,), gigabytes * 1e9, "made up"))
            flags = Flags(run_config.openrlhf).without_false()
            args = CompleteRun(run=on_a_gpu, flags=flags).on_machine().args
            assert args["ds.adam_offload"] == one.arguments["offload"]
            assert args["ds.enable_sleep"] and args["ds.zero_stage"] == 2 and args["ds.param_dtype"] == "bf16"


@pytest.mark.parametrize("rehearse", [True, False])
def test_float32_is_float32_in_every_stage_of_exactness(rehearse: bool) -> None:
    """Triton's own default for products of float32 is TF32."""
    settings = set()
    for one in stages(rehearse):
        if one.module == "exactness":
            settings.add((one.arguments["dtype"], one.env.get("TRITON_F32_DEFAULT")))
    expected = {("float32", "ieee")}
    if not rehearse:
        expected.add(("bfloat16", None))
    assert settings == expected
