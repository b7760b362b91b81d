# SPDX-License-Identifier: Apache-2.0
"""Environments of the package verifiers as tasks, made here and published. Slow: `make test-all` installs the packages.

What an environment says is held against what is computed here by hand, or by the published package's own functions.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ngrpo.trainers.openrlhf.rewards import CheckedReward, RewardFailed
from ngrpo.workbench import evaluate, tasks
from ngrpo.workbench.environments.process import EnvironmentProcess
from ngrpo.workbench.evaluate import scorers
from ngrpo.workbench.tasks import verifiers as task
from perturbations.errors import UsageError
from tests.environment_files import SUMS, TASKS

pytest.importorskip("verifiers", reason="needs verifiers: pip install verifiers==0.3.1")
pytestmark = pytest.mark.slow
RELEASE = tuple(int(part) for part in metadata.version("verifiers").split(".")[:2])
CLASSIC = pytest.mark.skipif(RELEASE >= (0, 4), reason="verifiers 0.4 has no load_environment any more")
TASKSETS = pytest.mark.skipif(RELEASE < (0, 3), reason="before verifiers 0.3 tasksets were another thing")

PROMPT = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(autouse=True)
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules of the test, importable as installed ones are."""
    (tmp_path / "sums_environment.py").write_text(SUMS)
    (tmp_path / "sums_tasks.py").write_text(TASKS)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    yield


def prepared(environment: str, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out rows, as OpenRLHF reads them."""
    tasks.prepare(f"verifiers:{environment}", folder)
    files = [folder / f"{name}.jsonl" for name in ("train", "eval")]
    read = [[json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [] for file in files]
    return read[0], read[1]


def rewarded(row: dict[str, Any], answer: str) -> dict[str, float]:
    """Reward and metrics of one answer, by the function that OpenRLHF calls."""
    found = task.reward_func([PROMPT + answer + "<|im_end|>\n"], [PROMPT], [row["label"]])
    return {"reward": found["rewards"].item(), **{name: value.item() for name, value in found["extra_logs"].items()}}


@CLASSIC
def test_dataset_rubric_and_metrics(tmp_path: Path) -> None:
    train, held_out = prepared("sums-environment", tmp_path / "task")
    assert len(train) == 21 and len(held_out) == 3, "one in eight, where an environment has none for evaluation"
    assert train[7]["input"] == [{"role": "user", "content": "What is 7 + 5?"}]
    assert rewarded(train[7], "It is 12") == {
        "reward": 1.0, "rubric/right": 1.0, "rubric/brief": 0.0, "rubric/fragile": 0.125, "rubric/num_turns": 1.0,
        "rubric/failed": 0.0,
    }  # fmt: skip
    assert rewarded(train[7], "12")["reward"] == 1.25 and rewarded(train[6], "12")["reward"] == 0.25
    nothing = rewarded(train[7], "")
    assert (nothing["reward"], nothing["rubric/fragile"], nothing["rubric/failed"]) == (0.25, 0.0, 1.0)


@CLASSIC
def test_openrlhf_loads_it_by_path_and_calls_it_in_threads(tmp_path: Path) -> None:
    """As the agent of OpenRLHF 0.11.2 does (``utils/agent.py``), with the watch of ours around it."""
    flags = tasks.prepare("verifiers:sums_environment", tmp_path)
    row = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[3])
    spec = importlib.util.spec_from_file_location("reward_func", flags["--reward.remote_url"])
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    checked = CheckedReward(loaded.reward_func)
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda said: checked([PROMPT + said], [PROMPT], [row["label"]]), ["8", "no", "8.", "The sum is 8"])
        )
    assert [each["rewards"].item() for each in found] == [1.25, 0.25, 0.25, 1.0]
    wrong = json.dumps({**json.loads(row["label"]), "row": {"prompt": "?"}})
    with pytest.raises(RewardFailed, match="the reward function raised RuntimeError: KeyError"):
        checked([PROMPT + "8"], [PROMPT], [wrong])


@CLASSIC
def test_problems_for_evaluation_and_system_prompt(tmp_path: Path) -> None:
    """What is held out is not trained on either."""
    train, held_out = prepared("sums_environment:with_evaluation", tmp_path / "task")
    assert [row["input"][1]["content"] for row in held_out] == [f"What is {n} + 5?" for n in (100, 101, 3)]
    assert len(train) == 23 and train[0]["input"][0] == {"role": "system", "content": "Answer briefly."}
    assert rewarded(held_out[1], "106")["reward"] == 1.25


@CLASSIC
def test_evaluation_reads_the_same_rubric() -> None:
    """`ngrpo eval` and `ngrpo diagnose` take a task so."""
    problems = evaluate.load_task("verifiers:sums_environment")
    assert [problem.question for problem in problems] == [f"What is {n} + 5?" for n in (21, 22, 23)]
    scorers.check_problems(problems)
    right, wrong = (scorers.score(problems[0], text) for text in ("The sum is 26", "28"))
    assert (right.reward, right.correct, right.extracted) == (1.0, True, "26")
    assert (wrong.reward, wrong.correct) == (0.25, False)


@CLASSIC
def test_many_threads_ask_at_once() -> None:
    """Eight judges that take half a second each: the answers find those who asked."""
    process = EnvironmentProcess("sums_environment:slow_judge")
    rows = process.rows()[0]
    process.score(rows[0].data, "first")
    began = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: process.score(rows[n % 7].data, str(n)), range(8)))
    process.close()
    assert [each.reward for each in found] == [1.0] * 8 and time.perf_counter() - began < 2.0


@CLASSIC
def test_a_process_that_dies_is_an_error() -> None:
    process = EnvironmentProcess("sums_environment:dies")
    rows = process.rows()[0]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="process of the environment sums_environment:dies has ended"):
            process.score(rows[0].data, "12")


@CLASSIC
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("talking", "Talking takes more than one turn"),
        ("tools", "more than one turn"),
        ("group", "compares the answers of a group"),
        ("mixed", "Talking takes more than one turn"),
        ("pictures", "a prompt holds pictures"),
        ("nothing", "gives dict, not a verifiers.Environment"),
        ("fails", "OSError: the dataset cannot be reached"),
        ("loader", "has no loader"),
    ],
)
def test_what_is_not_served_is_refused(name: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        tasks.prepare(f"verifiers:sums_environment:{name}", tmp_path)


@TASKSETS
@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ("sums_tasks:Sandboxed", "its tasks have a setup for a sandbox"),
        ("sums_tasks:Looked", "its reward files looks into a sandbox"),
        ("json", "neither a function load_environment nor one Taskset"),
    ],
)
def test_tasks_that_need_more_than_a_reply_are_refused(environment: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        tasks.prepare(f"verifiers:{environment}", tmp_path)


@CLASSIC
@pytest.mark.skipif(RELEASE >= (0, 3), reason="it has tasksets")
def test_an_older_release_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a Taskset needs verifiers 0\.3 or 0\.4"):
        tasks.prepare("verifiers:sums_tasks", tmp_path)


@pytest.mark.skipif(RELEASE < (0, 4), reason="it has both kinds")
def test_a_later_release_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"verifiers 0\.4.* is installed; environments with load_environment need"):
        tasks.prepare("verifiers:sums_environment", tmp_path)


@TASKSETS
def test_a_taskset(tmp_path: Path) -> None:
    train, held_out = prepared("sums_tasks", tmp_path / "task")
    assert (len(train), len(held_out)) == (18, 2)
    assert [message["role"] for message in train[4]["input"]] == ["system", "user"]
    assert rewarded(train[4], "9") == {
        "reward": 2.0, "rubric/right": 1.0, "rubric/words": 1.0, "rubric/asked": 1.0, "rubric/failed": 0.0,
    }  # fmt: skip
    assert rewarded(train[4], "It is 9")["reward"] == 0.0


@CLASSIC
def test_the_published_sophistry_bench(tmp_path: Path) -> None:
    """A package of PyPI with load_environment; its own functions say what its rubric must give."""
    published = pytest.importorskip("sophistry_bench_sprint", reason="needs sophistry-bench-sprint 0.1.6")
    train, held_out = prepared("sophistry-bench-sprint", tmp_path)
    assert len(train) > 4 * len(held_out) > 0
    data = json.loads(train[0]["label"])["row"]
    info = json.loads(data["info"]) if isinstance(data["info"], str) else data["info"]
    passage = info["passage"]
    quote = " ".join(passage.split()[5:25])
    answer = f"<claim>It is so.</claim>\n<cite>{quote}</cite>\n<claim>And so.</claim>\n<cite>not in it at all</cite>"
    claims, citations = published.parse_claims(answer), published.parse_citations(answer)
    found = rewarded(train[0], answer)
    assert found["reward"] == pytest.approx(published.aggregate_reward(claims, citations, passage), abs=1e-6)
    assert (found["rubric/n_claims_metric"], found["rubric/n_citations_metric"], found["rubric/failed"]) == (2, 2, 0)


@TASKSETS
def test_the_published_marble_v1() -> None:
    """A taskset of PyPI without an end; each of its problems has a layout that is known to score."""
    pytest.importorskip("marble_v1", reason="needs marble-v1 0.1.0")
    process = EnvironmentProcess("marble-v1")
    train, held_out = process.rows()
    assert (len(train), len(held_out)) == (512, 64)
    for row in train[:3]:
        solution = json.dumps(row.data["solution"])
        assert process.score(row.data, f"```json\n{solution}\n```").reward == 1.0
        found = process.score(row.data, "It cannot be done.")
        assert found.reward == 0.0 and found.metrics["answered_legally"] == 0.0
    process.close()
