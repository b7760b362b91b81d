# SPDX-License-Identifier: Apache-2.0
"""A reward file gives a response the same reward in training and in evaluation, and alarms in it are named."""

import asyncio
import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ngrpo.methods.scoring import reward_calls
from ngrpo.methods.scoring.problems import load_problems
from ngrpo.methods.scoring.reward_alarms import alarm_notes
from ngrpo.methods.scoring.reward_calls import (
    _OF_OPENRLHF,
    _PREFIXES_OF_OPENRLHF,
    SECONDS,
    call,
    load,
    with_floats,
)
from ngrpo.methods.tasks import score
from ngrpo.trainers.openrlhf.rewards import CheckedReward, RewardFailed
from ngrpo.workbench.evaluate import Problem
from perturbations.errors import UsageError
from tests.support.run import run_of

PROMPT, RESPONSE = "Which?", " 7"
CAUGHT = """
import signal
def reward_func(queries, prompts, labels):
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return {"rewards": 1.0}
    except ValueError:
        return {"rewards": 0.0}
"""
OF_MATH_VERIFY = """
from math_verify import parse, verify
def reward_func(queries, prompts, labels):
    try:
        gold = parse(labels[0], raise_on_error=True{parsing})
        answer = parse("7", raise_on_error=True{parsing})
        return {{"rewards": float(verify(gold, answer, raise_on_error=True{verifying}))}}
    except Exception:
        return {{"rewards": 0.0}}
"""
MATH_VERIFY = OF_MATH_VERIFY.format(parsing="", verifying="")
WITHOUT_ALARMS = OF_MATH_VERIFY.format(parsing=", parsing_timeout=None", verifying=", timeout_seconds=None")
OTHER_NAMES = "def reward_func(q, p, answers):\n    return {'rewards': [float(q[0].endswith(answers[0]))]}\n"


def result(of: str) -> str:
    return f"def reward_func(queries, prompts, labels):\n    inf, nan = float('inf'), float('nan')\n    return {of}\n"


def problem(scorer: Path) -> Problem:
    return Problem("p", ({"role": "user", "content": PROMPT},), "7", str(scorer))


def in_both(folder: Path, text: str) -> tuple[float, float, bool]:
    """The reward in training, that in evaluation, and whether evaluation counts the response as right."""
    file = folder / "reward.py"
    file.write_text(text)
    load.cache_clear()
    trained = asyncio.run(CheckedReward(load(str(file))).reward_of(PROMPT + RESPONSE, PROMPT, "7"))
    verdict = score(problem(file), RESPONSE)
    return trained["rewards"], verdict.reward, verdict.correct


@pytest.mark.parametrize(
    ("text", "reward", "correct"),
    [
        (CAUGHT, 0.0, False),
        (OTHER_NAMES, 1.0, True),
        (result("{'rewards': 1.0, 'scores': None}"), 1.0, True),
        (result("{'rewards': [0.25], 'scores': [[1.0]]}"), 0.25, True),
        (result("{'rewards': 1.0, 'scores': 0}"), 1.0, False),
    ],
)
def test_training_and_evaluation_agree(text: str, reward: float, correct: bool, tmp_path: Path) -> None:
    assert in_both(tmp_path, text) == (reward, reward, correct)


@pytest.mark.more
def test_they_agree_on_math_verify(tmp_path: Path) -> None:
    """Its alarm raises in both, where evaluation alone gave 1; without alarms the answer is right in both."""
    pytest.importorskip("math_verify")
    assert in_both(tmp_path, MATH_VERIFY) == (0.0, 0.0, False)
    assert in_both(tmp_path, WITHOUT_ALARMS) == (1.0, 1.0, True)


@pytest.mark.parametrize(
    ("of", "fault"),
    [
        ("{}.get('gold')", "returned 'None' where a dictionary with 'rewards' is needed"),
        ("list((1.0,))", r"returned '\[1.0\]' where a dictionary"),
        ("{'rewards': None}", "returned 'None' as 'rewards' of one response"),
        ("{'rewards': nan}", "returned 'nan' as 'rewards' of one response"),
        ("{'rewards': [inf]}", r"returned '\[inf\]' as 'rewards' of one response"),
        ("{'rewards': 1.0, 'scores': inf}", "returned 'inf' as 'scores' of one response"),
        ("{'rewards': [1.0, 0.0]}", r"returned '\[1.0, 0.0\]' as 'rewards' of one response"),
        ("{'rewards': 1.0, 'scores': [1.0, 0.0]}", r"returned '\[1.0, 0.0\]' as 'scores' of one response"),
        ("{'rewards': 'yes'}", "returned 'yes' as 'rewards' of one response"),
        ("labels['gold']", r"raised TypeError: list indices .*, in line \d+ of reward\.py: return labels\['gold'\]"),
        ("{'rewards': 1.0, 'extra_logs': [1.0]}", r"returned '\[1.0\]' as 'extra_logs' where a dictionary"),
        ("{'rewards': 1.0, 'extra_logs': {'why': 'no box'}}", r"""returned 'no box' as "extra_logs\['why'\]" of one"""),
        ("{'rewards': 1.0, 'extra_logs': {'reward': 9}}", "returned 'extra_logs' with 'reward', .*: give it another"),
        ("{'rewards': 1.0, 'extra_logs': {'kl': 9}}", "returned 'extra_logs' with 'kl', .*: give it another"),
        ("{'rewards': 1.0, 'extra_logs': {'timing/x': 9}}", "returned 'extra_logs' with 'timing/x', .*: give it"),
        ("{'rewards': 1.0, 'extra_logs': {'cut_turns': 9}}", "returned 'extra_logs' with 'cut_turns', .*: give it"),
        ("{'rewards': 1.0, 'extra_logs': {'credit/x': 9}}", "returned 'extra_logs' with 'credit/x', .*: give it"),
    ],
)
def test_what_training_refuses_evaluation_refuses(of: str, fault: str, tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(result(of))
    load.cache_clear()
    with pytest.raises(RewardFailed, match=f"the reward function {fault}"):
        asyncio.run(CheckedReward(load(str(file))).reward_of(PROMPT + RESPONSE, PROMPT, "7"))
    with pytest.raises(UsageError, match=rf"scorer .*reward\.py: reward_func {fault}.*, for problem 'p'\."):
        score(problem(file), RESPONSE)


def test_a_value_that_nothing_reads_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    reward_calls._warn_of_unread.cache_clear()
    for _ in range(2):
        assert reward_calls.with_floats({"rewards": 1, "score": 0.5}) == {"rewards": 1.0, "score": 0.5}
    said = capsys.readouterr().err
    assert said.startswith("ngrpo: warning: a reward gives 'score', which nothing reads. Did you mean 'scores'? Read")
    assert said.count("warning") == 1
    reward_calls.with_floats({"rewards": 1, "scores": 1, "extra_logs": {"length": 3}})
    assert capsys.readouterr().err == ""


def test_a_label_stays_as_it_is_for_the_next_response() -> None:
    """All responses of a group have the same label."""

    def reward_func(queries: list[str], prompts: list[str], labels: list[list[str]]) -> dict[str, float]:
        labels[0].append("seen")
        return {"rewards": len(labels[0])}

    label = ["7"]
    assert [call(reward_func, "q", "p", label, 10.0)["rewards"] for _ in range(2)] == [2.0, 2.0]
    assert label == ["7"]


def test_further_metrics_become_floats() -> None:
    result = with_floats({"rewards": 1, "extra_logs": {"has_form": torch.tensor([True]), "length": [7]}})
    assert result["extra_logs"] == {"has_form": 1.0, "length": 7.0}
    assert with_floats({"rewards": 1, "extra_logs": None})["extra_logs"] == {}


def test_the_names_of_openrlhf_s_metrics_are_those_of_its_source() -> None:
    """Whatever its trainers put into a sample's ``info`` or into a step's metrics, and sample fields that it logs."""
    openrlhf = find_spec("openrlhf")
    if openrlhf is None or not openrlhf.submodule_search_locations:
        pytest.skip("OpenRLHF is not installed")
    trainers = Path(openrlhf.submodule_search_locations[0]) / "trainer"
    files = [*trainers.glob("ppo_*.py"), *trainers.glob("ppo_utils/*.py"), *trainers.glob("ray/ppo_*.py")]
    source = "\n".join(file.read_text() for file in files)
    names = set(re.findall(r'\b(?:info|metrics|status|merged_status)\["([^"]+)"\] =', source))
    for literal in re.findall(r"\b(?:info|metrics|status|stats|reduced_status) = \{([^}]*)\}", source):
        names |= set(re.findall(r'"([^"]+)":', literal))
    names |= set(re.findall(r'(\w+): torch\.Tensor = tensor_field\("episode"', source)) - {"rewards", "scores"}
    assert {name for name in names if not name.startswith(_PREFIXES_OF_OPENRLHF)} == set(_OF_OPENRLHF)


def test_a_scorer_that_exits_is_named(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(f"{CAUGHT}\nraise SystemExit(3)\n")
    with pytest.raises(UsageError, match=r"scorer .*reward\.py: SystemExit: 3\. Correct the file"):
        score(problem(file), RESPONSE)


def test_both_end_a_call_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECONDS, "0.05")
    file = tmp_path / "reward.py"
    file.write_text("import time\ndef reward_func(queries, prompts, labels):\n    time.sleep(60)\n    return {}\n")
    load.cache_clear()
    with pytest.raises(UsageError, match=r"reward_func did not return within 0\.05 s"):
        score(problem(file), RESPONSE)
    monkeypatch.setenv(SECONDS, "soon")
    with pytest.raises(UsageError, match="NGRPO_REWARD_SECONDS=soon: a positive number"):
        score(problem(file), RESPONSE)


# ---- alarms, named before a start --------------------------------------------------------------------------------

PARSE = "from math_verify import parse\n"
ALARMS: dict[str, tuple[str, list[str]]] = {
    "as in its readme": (MATH_VERIFY, ["5: math_verify.parse", "6: math_verify.parse", "7: math_verify.verify"]),
    "without alarms": (WITHOUT_ALARMS, []),
    "by the module": ("import math_verify as mv\nmv.parse('1')", ["2: math_verify.parse"]),
    "of its parts": ("from math_verify.parser import parse as read\nread('1')", ["2: math_verify.parser.parse"]),
    "of 0 seconds": (f"{PARSE}parse('1', parsing_timeout=0)", []),
    "without one by place": (f"{PARSE}parse('1', (), 'a', 'b', None)", []),
    "of 3 seconds": (f"{PARSE}parse('1', parsing_timeout=3)", ["2: math_verify.parse"]),
    "of 3 seconds by place": (f"{PARSE}parse('1', (), 'a', 'b', 3)", ["2: math_verify.parse"]),
    "by options": (f"{PARSE}parse('1', **OPTIONS)\nparse('1', parsing_timeout=LIMIT)", []),
    "as a metric": ("from math_verify.metric import math_metric as m\nm()", ["2: math_verify.metric.math_metric"]),
    "a signal": (CAUGHT, ["5: signal.signal"]),
    "a signal by name": ("from signal import SIGALRM, signal\nsignal(SIGALRM, print)", ["2: signal.signal"]),
    "other signals": ("import signal\nsignal.getsignal(signal.SIGINT)", []),
    "another parse": ("from json import loads as parse\nparse('1')\nself.signal.signal()", []),
    "no Python": ("def", []),
}


@pytest.mark.parametrize("name", ALARMS)
def test_alarms_in_a_reward_file(name: str, tmp_path: Path) -> None:
    text, wanted = ALARMS[name]
    (tmp_path / "reward.py").write_text(text)
    notes = list(alarm_notes("--reward.remote_url", str(tmp_path / "reward.py")))
    assert [note.partition(".py: line ")[2].partition(" sets a signal")[0] for note in notes] == wanted
    assert all(note.startswith("--reward.remote_url ") and "raises ValueError outside" in note for note in notes)


def test_a_file_beside_it_is_read_too(tmp_path: Path) -> None:
    """Whoever imports whom, each is read once; `math_verify.py` is no file of this folder."""
    (tmp_path / "reward.py").write_text("from grader import grade\nfrom missing import nothing\n")
    (tmp_path / "grader.py").write_text(f"import reward\n{PARSE}parse('1')\n")
    notes = list(alarm_notes("--scorer", str(tmp_path / "reward.py")))
    assert [note.partition(" sets")[0] for note in notes] == [
        f"--scorer {tmp_path / 'grader.py'}: line 3: math_verify.parse"
    ]


def test_they_are_said_at_the_start(tmp_path: Path) -> None:
    """Of training, of an agent's file too, and of evaluation."""
    from ngrpo.config.complete_run import CompleteRun
    from ngrpo.config.run_notes import alarm_notes as notes_of_run
    from ngrpo.machine.upstream.openrlhf_flags import Flags

    file, data, said = tmp_path / "reward.py", tmp_path / "data.jsonl", list[Any]()
    file.write_text(MATH_VERIFY)
    for flag in ("--reward.remote_url", "--train.agent_func_path"):
        notes = list(notes_of_run(CompleteRun(run=run_of(), flags=Flags([flag, str(file)]))))
        assert len(notes) == 3 and notes[0].startswith(f"{flag} {file}: line 5: math_verify.parse sets")
        assert notes[0].endswith("Write parse(..., parsing_timeout=None).")
        assert notes[2].endswith("Write verify(..., timeout_seconds=None).")
    data.write_text('{"input": "a", "label": "b"}\n')
    load_problems(str(data), scorer=str(file), report=said.append)
    assert [line.partition(str(file))[0] for line in said] == ["warning: --scorer "] * 3


def test_a_limit_of_infinity_is_none() -> None:
    result = call(lambda queries, prompts, labels: {"rewards": 1.0}, "q", "p", "l", math.inf)
    assert result["rewards"] == 1.0
