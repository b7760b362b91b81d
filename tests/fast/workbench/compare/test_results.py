# SPDX-License-Identifier: Apache-2.0
"""The comparison's folder and what is computed from the runs in it, counts above a score and Fisher's test included."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from ngrpo.commands import compare as command
from ngrpo.machine.storage.result_folder import CannotWrite, write_json
from ngrpo.workbench.compare import results, runs
from ngrpo.workbench.compare.plan import Plan
from ngrpo.workbench.compare.runs import ComparisonFolder, identity, status
from ngrpo.workbench.report import write_report
from perturbations.errors import UsageError
from tests.support.compare_example import plan


@pytest.fixture
def folder(tmp_path: Path) -> ComparisonFolder:
    (tmp_path / "out").mkdir()
    return ComparisonFolder(tmp_path / "out")


def leave(
    folder: ComparisonFolder,
    made: Plan,
    number: int,
    correct: list[int],
    reward: float,
    speed: float = 100.0,
    evaluated: bool = True,
) -> None:
    """What a finished run leaves: four samples per problem, eight steps of which the last two have ``reward``."""
    run = made.runs()[number]
    place = folder.fresh(run)
    step = {"tokens_per_second": speed, "step_seconds": 10.0, "record_bytes_per_token": 1.5}
    rewards = [0.1] * 6 + [reward] * 2
    steps = [{"step": i + 1, "reward": r, **step} for i, r in enumerate(rewards)]
    steps[0]["tokens_per_second"] = 1.0  # the warm-up, which must not count
    scalars = {"eval/eval_default_pass1": {"4": 0.25, "8": 0.5}, "eval/eval_default_pass4": {"4": 1.0, "8": 1.0}}
    write_json(place / "summary.json", {"steps": steps, "hardware": "cpu", "perturbation": None, "evaluation": scalars})
    problems = [{"id": f"p{i}", "n": 4, "correct": c} for i, c in enumerate(correct)]
    scores = {"mean_at_n": sum(correct) / 4 / len(correct), "pass_at_k": {"1": 0.5, "2": 0.5}}
    if evaluated:
        lost = {"parsed": 0.75, "timed_out": 0.125, "cut": 0.0625}
        write_json(place / "evaluation" / "evaluation.json", {"n": 4, **scores, **lost, "problems": problems})
    ended = {"status": "done", "identity": identity(made, run), "seconds": 60.0, "peak_memory_bytes": 1000, "log": "x"}
    write_json(place / "run.json", ended)


Compared = tuple[Plan, ComparisonFolder, dict[str, Any]]


@pytest.fixture
def compared(folder: ComparisonFolder) -> Compared:
    made = plan("--perturbations", "none,neighbor,gumbel", "--seeds", "0,1,2")
    folder.claim(made.common())
    for seed, last in enumerate((1, 2, 3)):
        leave(folder, made, 3 * seed, [0, 2, 4, 2], reward=0.5)
        leave(folder, made, 3 * seed + 1, [1, 3, 4, 1 + last], reward=0.6 + last / 20, speed=90.0)
    failed = made.runs()[2]
    record = {"status": "failed", "identity": identity(made, failed), "error": "boom", "log": "runs/gumbel/train.log"}
    write_json(folder.fresh(failed) / "run.json", record)
    return made, folder, results.collect(made, folder, ["ngrpo", "compare"], "2026-11-21T10:00:00+0000")


def test_summary_by_hand(compared: Compared) -> None:
    """none: (0+2+4+2)/16 = 0.5. neighbor: (1+3+4+c)/16 with c = 2, 3, 4: 0.625, 0.6875, 0.75, so differences of
    2/16, 3/16, 4/16: mean 0.1875, spread 1/16, standard error 0.03608, and t = 5.196 of 2 degrees of freedom, p 0.0351;
    the 97.5% quantile 4.3027 makes the interval's half 0.1553. Pass@2 of c = 0, 2, 4 out of 4: 0, 5/6, 1. The reward
    goes from 0.1 to 0.65, 0.7, 0.75: up by 0.6 with half 4.3027 · 0.05/√3 = 0.1242. Speed: 90/100 after the first."""
    _, _, found = compared
    none, neighbor, gumbel = found["summary"]
    assert none["mean_at_n"]["value"] == 0.5 and none["difference"] is None
    assert none["pass_at_k"]["2"]["value"] == pytest.approx((0 + 5 / 6 + 1 + 5 / 6) / 4)
    assert neighbor["mean_at_n"]["value"] == 0.6875
    difference = neighbor["difference"]["mean_at_n"]
    expected = {"value": 0.1875, "spread": 0.0625, "low": 0.1875 - 0.1553, "high": 0.1875 + 0.1553, "p": 0.0351}
    assert {name: difference[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    assert (difference["comparisons"], difference["p_corrected"]) == (1, difference["p"])
    assert neighbor["verdict"].startswith("better: Mean@4 +0.188 [+0.032, +0.343] against none over 3 seeds (p 0.035)")
    change = neighbor["reward_change"]
    assert (change["value"], change["low"], change["high"]) == pytest.approx((0.6, 0.4758, 0.7242), abs=1e-4)
    assert set(neighbor["difference"]) == {"mean_at_n", "pass_at_k"}
    assert neighbor["cost"]["tokens_per_second"] == {"value": 90.0, "ratio": pytest.approx(0.9)}
    assert neighbor["cost"]["memory_bytes"]["ratio"] == 1.0
    assert (gumbel["seeds"], gumbel["failed"]) == ([], [0]) and "no seed has finished" in gumbel["verdict"]
    statuses = [run["status"] for run in found["runs"]]
    assert statuses == ["done", "done", "failed", "done", "done", "pending", "done", "done", "pending"]
    expected = [{"step": 4, "mean_at_n": 0.25}, {"step": 8, "mean_at_n": 0.5}]
    assert found["runs"][0]["evaluations"] == expected and found["runs"][2]["evaluations"] == []


def test_responses_that_say_little_stand_beside_the_scores(compared: Compared) -> None:
    """Of each run a sixteenth was cut, an eighth timed out, and an eighth more is unreadable."""
    made, folder, _ = compared
    untrained = {"n": 4, "mean_at_n": 0.0, "parsed": 0.0, "timed_out": 0.0, "cut": 1.0, "pass_at_k": {}}
    folder.write("untrained/evaluation.json", untrained)
    found = results.collect(made, folder, [], "")
    assert found["summary"][0]["unscored"] == {"cut": 0.0625, "unreadable": 0.125, "timed_out": 0.125}
    expected = "neighbor: 12% of the responses have no readable answer"
    assert expected in found["warnings"] and len(found["warnings"]) == 6
    shown = results.table(found)
    assert "6% / 12% / 12%" in shown and f"warning: {expected}" in shown
    results.write(found, folder)
    page = (folder.path / "report.html").read_text()
    assert page.count("6% / 12% / 12%") == 2 and "100% / 100% / 0%" in page and expected in page.partition("<nav")[0]


def test_rewards_alone_compare_nothing(folder: ComparisonFolder) -> None:
    """The rollouts of a perturbed strategy are drawn otherwise, so a reward of 0.9 beside 0.5 says nothing."""
    made = plan("--perturbations", "none,gumbel", "--seeds", "0,1,2", "--eval.data", "none")
    for number, run in enumerate(made.runs()):
        reward = 0.5 if run.arm.id == "none" else 0.9 + number / 100
        leave(folder, made, number, [1], reward=reward, evaluated=False)
    found = results.collect(made, folder, [], "")
    gumbel = found["summary"][1]
    assert gumbel["difference"] == {"mean_at_n": None, "pass_at_k": {}}
    assert gumbel["reward_last"]["value"] > 0.9 and gumbel["verdict"].startswith("was not compared with none")
    shown = results.table(found)
    assert "0.100 → 0.500" in shown and "better" not in shown


def test_json_holds_no_nan_and_csv_has_a_line_per_step(compared: Compared) -> None:
    made, folder, found = compared
    run = made.runs()[0]
    summary = folder.read(f"runs/{run.id}/summary.json")
    summary["steps"][0]["shift"] = float("nan")
    folder.write(f"runs/{run.id}/summary.json", summary)
    found = results.collect(made, folder, [], "")
    assert found["runs"][0]["steps"][0]["shift"] is None
    json.dumps(found, allow_nan=False)
    rows = list(csv.DictReader(results.as_csv(found).splitlines()))
    assert len(rows) == 6 * 8 + 3  # the failed and the pending runs have one line each
    assert rows[7]["mean_at_n"] == "0.5" and rows[6]["mean_at_n"] == ""


def test_finished_runs_are_kept_and_changed_ones_run_again(compared: Compared) -> None:
    made, folder, _ = compared
    run, changed = made.runs()[0], plan("--perturbations", "none", "--actor.adam.lr", "1e-5")
    assert status(made, run, folder)["status"] == "done"
    assert status(changed, changed.runs()[0], folder)["status"] == "other"
    evaluation = folder.run_folder(run) / "evaluation" / "evaluation.json"
    kept = evaluation.read_text()
    evaluation.unlink()  # as the message of a damaged one says
    assert status(made, run, folder)["status"] == "pending"
    evaluation.write_text(kept)
    # A kill while writing cannot leave this, and the run's folder must not be taken for an interrupted one's.
    (folder.run_folder(run) / "run.json").write_text('{"status": "do')
    with pytest.raises(UsageError, match=r"run\.json is damaged.*delete it"):
        status(made, run, folder)


def test_finished_runs_are_looked_at_again_before_each_run(
    folder: ComparisonFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset that changes while the first run trains: the second would be of other content than the first."""
    data, executed = tmp_path / "data.jsonl", []
    data.write_text("1")
    words = ("--eval.data", "none", "--data.prompt_dataset", str(data))
    made = plan("--perturbations", "none", "--seeds", "0,1", *words)

    def execute(plan: Plan, run: Any, folder: ComparisonFolder, on_step: Any) -> dict[str, Any]:
        executed.append(run.id)
        leave(folder, plan, len(executed) - 1, [1], reward=0.5, evaluated=False)
        data.write_text("2")
        return {"status": "done", "seconds": 1.0}

    monkeypatch.setattr(runs, "execute", execute)
    with pytest.raises(UsageError, match=r"1 finished runs in .* other content of the files .*: none-seed0"):
        command._compare(made, folder, [], lambda line: None)
    assert executed == ["none-seed0"] and (folder.run_folder(made.runs()[0]) / "summary.json").is_file()


def test_the_diagnosis_is_of_the_arms_that_roll_out_as_it_does() -> None:
    """Of the sweep only the perturbation at its own temperature was diagnosed."""
    rows = [{"name": "none"}, {"name": "gumbel"}]
    for words, names in (
        (["--perturbations", "none,gumbel", "--base", "grpo,gspo"], ["none base=grpo", "gumbel base=grpo"]),
        (["--strategy", "none --rollout.temperature=0.5", "--strategy", "gumbel"], ["none", "gumbel"]),
    ):
        named = results._named({"strategies": rows, "samples": []}, plan(*words).arms)
        assert [row["name"] for row in named["strategies"]] == names


def test_another_comparison_in_the_same_folder(folder: ComparisonFolder) -> None:
    folder.claim(plan("--perturbations", "none").common())
    # More strategies and seeds are welcome.
    folder.claim(plan("--perturbations", "none,neighbor", "--seeds", "0,1").common())
    with pytest.raises(UsageError, match=r"shared was .* Give another --out"):
        folder.claim(plan("--perturbations", "none", "--actor.adam.lr", "1e-5").common())
    with pytest.raises(UsageError, match="evaluation was"):
        folder.claim(plan("--perturbations", "none", "--eval.n", "2").common())


@pytest.mark.parametrize("switch", [[], ["--discard-models"]])
def test_a_trained_model_is_discarded_once_it_is_evaluated(
    folder: ComparisonFolder, monkeypatch: pytest.MonkeyPatch, switch: list[str]
) -> None:
    seen: dict[str, bool] = {}

    def command(words: list[str], log: Path, *_: Any) -> None:
        (log.parent / "model").mkdir(exist_ok=True)
        seen[words[0]] = (log.parent / "model").is_dir()

    made, folder.lock = plan("--perturbations", "none", *switch), 0
    monkeypatch.setattr(runs, "command", command)
    record = runs.execute(made, made.runs()[0], folder, lambda step: None)
    assert record["status"] == "done" and seen == {"train": True, "eval": True}
    assert (folder.run_folder(made.runs()[0]) / "model").is_dir() == (not switch)
    assert made.common() == plan("--perturbations", "none").common()


def test_a_difference_is_of_the_runs_and_problems_that_both_have() -> None:
    one = {"mean_at_n": {"p": 0.5}}
    assert results._differences([one, {}], [{}, one]) == {"mean_at_n": None, "pass_at_k": {}}
    found = results._differences([{"mean_at_n": {"p0": 1.0, "p1": 0.0}}], [{"mean_at_n": {"p0": 0.5}}])
    assert found["mean_at_n"]["value"] == 0.5


def test_costs_are_of_the_same_seed_and_without_the_first_step() -> None:
    def run(memory: int, *speeds: float) -> dict[str, Any]:
        return {"peak_memory_bytes": memory, "steps": [{"tokens_per_second": speed} for speed in speeds]}

    found = results._cost({1: run(30, 10.0, 90.0, 100.0)}, {0: run(10), 1: run(20)}, [1])
    assert found["memory_bytes"] == {"value": 30.0, "ratio": 1.5}
    assert found["tokens_per_second"] == {"value": 95.0, "ratio": None}


def test_an_evaluation_before_training_of_other_problems_is_made_again(
    folder: ComparisonFolder, tmp_path: Path
) -> None:
    data, path = tmp_path / "problems.jsonl", folder.path / "untrained"
    made = plan("--perturbations", "none", "--eval.data", str(data))
    for content in ("1", "2"):
        data.write_text(content)
        assert not runs.is_evaluated(made, "model", folder, path)
        folder.write("untrained/evaluation.json", {})
        assert runs.is_evaluated(made, "model", folder, path)


def _run(strategy: str, seed: int, correct: int, status: str = "done") -> dict:
    problems = [{"id": "a", "n": 10, "correct": correct}]
    evaluation = (
        {"problems": problems, "mean_at_n": correct / 10 + 2e-16, "pass_at_k": {}} if status == "done" else None
    )
    run = {"strategy": strategy, "seed": seed, "status": status, "evaluation": evaluation}
    return run | {"steps": [], "peak_memory_bytes": None}


def test_runs_above_a_threshold_are_counted() -> None:
    """Exactly the threshold is not above it; what failed is no run; p is Holm's over the strategies."""
    runs = [_run("none", seed, 8 if seed == 0 else 6) for seed in range(5)]
    runs += [_run("away", seed, 9) for seed in range(5)]
    runs += [_run("some", seed, 9 if seed else 6) for seed in range(4)] + [_run("some", 4, 0, "failed")]
    rows = results.summarise(runs, ["none", "away", "some"], "none", 0.8)
    none, away, some = (row["above"] for row in rows)
    assert none == {"threshold": 0.8, "runs": 0, "of": 5}
    assert (away["runs"], away["of"], some["runs"], some["of"]) == (5, 5, 3, 4)
    assert away["p"] == pytest.approx(2 / 252) and away["p_corrected"] == pytest.approx(4 / 252)
    # 3 of 4 and 0 of 5: 4 ways of C(9, 3) = 84; none of the others (30, 40, 10) is as rare.
    assert some["p"] == pytest.approx(4 / 84) == some["p_corrected"]
    assert rows[0]["verdict"].endswith("the baseline; 0 of 5 runs end above 0.8")
    assert "5 of 5 runs end above 0.8, of none 0 of 5 (Fisher's exact p 0.0079, 0.016 corrected" in rows[1]["verdict"]
    assert all("above" not in row for row in results.summarise(runs, ["none", "away", "some"], "none"))


def test_the_clearest_difference_is_better_on_the_page_too(tmp_path: Path) -> None:
    """Six seeds of one problem, none right and all: 2 of 2^6 patterns of signs."""
    runs = [_run(name, seed, right) for name, right in (("none", 0), ("away", 10)) for seed in range(6)]
    rows = results.summarise(runs, ["none", "away"], "none")
    assert rows[1]["verdict"] == "better: Mean@10 +1.000 against none with each of 6 seeds (p 0.031)"
    found = {"strategies": [{"id": "none"}, {"id": "away"}], "runs": runs, "summary": rows, "baseline": "none"}
    write_report(found, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Better than “none” in Mean@n beyond noise: away." in page and "+1.000, beyond noise" in page
    assert "0.000 to 0.390" in page, "Wilson's interval of 0 in 6"


def test_full_disk(folder: ComparisonFolder) -> None:
    with pytest.raises(CannotWrite, match=r"GiB are free.*make room"):
        folder.need(1 << 60)
