# SPDX-License-Identifier: Apache-2.0
"""What the screen shows of a run's log: its phases with their counts, on a terminal and in a file."""

import io
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from ngrpo.machine import progress
from ngrpo.machine.upstream.log_phases import PHASES, Phase, Status, status_of

# As Ray, OpenRLHF and vLLM print them; a bar's name of a process ends with a carriage return, so that the bar is alone.
START = """ngrpo: starting OpenRLHF
\x1b[36m(RolloutRayActor pid=8)\x1b[0m INFO 11-28 06:53:29 [model.py:684] Resolved architecture: LlamaForCausalLM
\x1b[36m(PolicyModelActor pid=7)\x1b[0m
Loading weights:   0%|          | 0/272 [00:00<?, ?it/s]
Loading weights:  41%|████      | 111/272 [00:01<00:01, 135.86it/s]
\x1b[36m(RolloutRayActor pid=8)\x1b[0m (EngineCore pid=9) INFO [core.py:123] Initializing a V1 LLM engine (v0.29.0)
\x1b[36m(RolloutRayActor pid=8)\x1b[0m (EngineCore pid=9) ngrpo: start-up check of the engine …
\x1b[36m(PPOTrainer pid=6)\x1b[0m ngrpo: evaluating 16 problems: 0 of 16 …
Generate samples:  38%|███▊      | 3/8 [00:01<00:01,  2.3it/s, prompts_consumed=8]
\x1b[36m(PPOTrainer pid=6)\x1b[0m ngrpo: evaluating 16 problems: 8 of 16 …
Generate samples:  38%|███▊      | 3/8 [00:01<00:01,  2.3it/s, prompts_consumed=8]
\x1b[36m(PPOTrainer pid=6)\x1b[0m INFO 11-28 06:54:12 ppo_trainer.py:598] ✨ Evaluation completed in 0:00:29
Generate samples:  12%|█▎        | 1/8 [00:00<00:00, 77.06it/s, prompts_consumed=8]
\x1b[36m(PolicyModelActor pid=7)\x1b[0m
forward:  25%|██▌       | 1/4 [00:01<00:05,  1.88s/it]
Train epoch [1/1]:   0%|          | 0/4 [00:09<?, ?it/s, act_loss=-0.371]
ngrpo: step 1: reward 0.281, 55 s
\x1b[36m(PPOTrainer pid=6)\x1b[0m
Generate samples:  12%|█▎        | 1/8 [00:00<00:00, 77.06it/s, prompts_consumed=8]
""".splitlines()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time, in seconds; it passes between lines only."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setenv("TERM", "xterm")
    return clock


def shown(screen: io.StringIO, clock: SimpleNamespace, lines: list[str], seconds: float) -> str:
    def later() -> object:
        for line in lines:
            clock.now += seconds
            yield line

    progress.show_progress(later(), screen)
    return screen.getvalue()


def test_a_file_has_a_line_for_each_phase_when_it_first_begins(clock: SimpleNamespace) -> None:
    lines = shown(io.StringIO(), clock, START, 1.0).splitlines()
    assert [line.split(" s  ")[1] for line in lines] == [
        "starting OpenRLHF",
        "configuring the engine",
        "loading the actor",
        "starting the engine",
        "start-up check of the engine",
        "evaluating 16 problems",
        "drawing responses: 1 of 8 prompts",
        "computing log-probabilities: 1 of 4 micro-batches",
        "updating the weights",
        "step 1: reward 0.281, 55 s",
    ]
    assert "\r" not in "".join(lines) and "\x1b" not in "".join(lines)


def test_after_half_a_minute_of_silence_it_has_the_phase_again(clock: SimpleNamespace) -> None:
    """An evaluation's count is over all of its batches."""
    until_second_batch = START[:11]
    lines = shown(io.StringIO(), clock, [*until_second_batch, *[""] * 45], 1.0).splitlines()
    assert [line.strip() for line in lines[-2:]] == [
        "8 s  evaluating 16 problems",
        "39 s  evaluating 16 problems: 11 of 16",
    ]


def test_a_terminal_has_one_line_with_a_bar_that_is_written_again(clock: SimpleNamespace) -> None:
    text = shown(Terminal(), clock, START, 1.0)
    assert "\r      5 s  loading the actor  [==========              ] 111/272 tensors\x1b[K" in text
    assert "\r     10 s  evaluating 16 problems  [====                    ] 3/16\x1b[K" not in text
    assert "\r     11 s  evaluating 16 problems  [================        ] 11/16\x1b[K" in text
    assert "\r\x1b[K     17 s  step 1: reward 0.281, 55 s\n" in text
    assert text.endswith("\r\x1b[K"), "the status is cleared at the end"
    assert [line for line in text.replace("\x1b[K", "\r").split("\n") if line][-1].count("\r") > 1
    assert max(len(line) for line in text.replace("\x1b[K", "\r").replace("\n", "\r").split("\r")) < 80


def test_a_dumb_terminal_is_as_a_file(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "\r" not in shown(Terminal(), clock, START, 1.0)


def test_what_is_announced_is_read_again(capsys: pytest.CaptureFixture[str], clock: SimpleNamespace) -> None:
    progress.announce("start-up check of the engine")
    progress.announce("evaluating 64 problems", 40, 64)
    printed = capsys.readouterr()
    assert printed.out == ""
    reader = progress._StatusReader()
    statuses = []
    for line in printed.err.splitlines():
        reader.read(line, progress._OURS.search(line))
        statuses.append(reader.status)
    assert statuses == [Status("start-up check of the engine"), Status("evaluating 64 problems", 40, 64)]


def test_lines_of_no_phase_show_none() -> None:
    assert status_of("(PPOTrainer pid=6) INFO experience_maker.py:116] Starting experience making") is None


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.text)
def test_upstream_logs_the_line(phase: Phase) -> None:
    package, file = phase.source
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    source = (Path(spec.origin).parent / file).read_text(encoding="utf-8")
    assert phase.quoted in source


def test_a_phase_that_ray_repeats_is_no_line_for_the_user() -> None:
    screen = io.StringIO()
    repeated = "\x1b[32m [repeated 2x across cluster] (Ray deduplicates logs by default.)"
    progress.show_progress(
        ["(Worker pid=7) ngrpo: importing torch …", f"(Worker pid=8) ngrpo: importing torch …{repeated}"], screen
    )
    assert screen.getvalue().count("importing torch") == 1
    assert "repeated" not in screen.getvalue()
