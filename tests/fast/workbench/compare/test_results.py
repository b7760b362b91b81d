# SPDX-License-Identifier: Apache-2.0
"""The comparison's folder and what is computed from the runs in it, counts above a score and Fisher's test included."""

import csv
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ngrpo.commands import compare as command
from ngrpo.machine.storage.result_folder import CannotWrite, write_json
from ngrpo.workbench.compare import results, runs, summaries
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
    comparison: Plan,
    number: int,
    correct: list[int],
    reward: float,
    speed: float = 100.0,
    evaluated: bool = True,
) -> None:
    """Writes what a finished run leaves.

    Args:
        folder: of the comparison.
        comparison: the plan of the run.
        number: of the run in its plan.
        correct: by problem, how many of four samples are right.
        reward: of the last two of eight steps; the others have 0.1.
        speed: tokens per second of all steps but the first, which warms up and must not count.
        evaluated: whether the run has an evaluation after the training.
    """
    run = comparison.runs()[number]
    run_folder = folder.fresh(run)
    steps = []
    for step, step_reward in enumerate([0.1] * 6 + [reward] * 2, start=1):
        row = {"step": step, "reward": step_reward, "tokens_per_second": 1.0 if step == 1 else speed}
        steps.append({**row, "step_seconds": 10.0, "record_bytes_per_token": 1.5})
    while_training = {
        "eval/eval_default_pass1": {"4": 0.25, "8": 0.5},
        "eval/eval_default_pass4": {"4": 1.0, "8": 1.0},
    }
    summary = {"steps": steps, "hardware": "cpu", "perturbation": None, "evaluation": while_training}
    write_json(run_folder / "summary.json", summary)
    if evaluated:
        evaluation = {
            "n": 4,
            "mean_at_n": sum(correct) / 4 / len(correct),
            "pass_at_k": {"1": 0.5, "2": 0.5},
            "parsed": 0.75,
            "timed_out": 0.125,
            "cut": 0.0625,
            "problems": [{"id": f"p{i}", "n": 4, "correct": count} for i, count in enumerate(correct)],
        }
        write_json(run_folder / "evaluation" / "evaluation.json", evaluation)
    record = {
        "status": "done",
        "identity": identity(comparison, run),
        "seconds": 60.0,
        "peak_memory_bytes": 1000,
        "log": "x",
    }
    write_json(run_folder / "run.json", record)


class Compared(NamedTuple):
    """A comparison in its folder, and its results."""

    plan: Plan
    folder: ComparisonFolder
    results: dict[str, Any]


@pytest.fixture
def compared(folder: ComparisonFolder) -> Compared:
    """Three arms with three seeds: two arms have finished, gumbel's first run has failed and its others are pending."""
    comparison = plan("--perturbations", "none,neighbor,gumbel", "--seeds", "0,1,2")
    folder.claim(comparison.common())
    for seed, last in enumerate((1, 2, 3)):
        leave(folder, comparison, 3 * seed, [0, 2, 4, 2], reward=0.5)
        leave(folder, comparison, 3 * seed + 1, [1, 3, 4, 1 + last], reward=0.6 + last / 20, speed=90.0)
    failed = comparison.runs()[2]
    record = {
        "status": "failed",
        "identity": identity(comparison, failed),
        "error": "boom",
        "log": "runs/gumbel/train.log",
    }
    write_json(folder.fresh(failed) / "run.json", record)
    collected = results.collect(comparison, folder, ["ngrpo", "compare"], "2026-11-21T10:00:00+0000")
    return Compared(comparison, folder, collected)


def test_the_baseline_by_hand(compared: Compared) -> None:
    none = compared.results["summary"][0]
    # (0+2+4+2)/16
    assert none["mean_at_n"]["value"] == 0.5
    assert none["difference"] is None
    # Pass@2 of c = 0, 2, 4, 2 out of 4.
    assert none["pass_at_k"]["2"]["value"] == pytest.approx((0 + 5 / 6 + 1 + 5 / 6) / 4)


def test_a_difference_by_hand(compared: Compared) -> None:
    """none: (0+2+4+2)/16 = 0.5. neighbor: (1+3+4+c)/16 with c = 2, 3, 4: 0.625, 0.6875, 0.75, so differences of
    2/16, 3/16, 4/16: mean 0.1875, spread 1/16, standard error 0.03608, and t = 5.196 of 2 degrees of freedom, p 0.0351;
    the 97.5% quantile 4.3027 makes the interval's half 0.1553."""
    neighbor = compared.results["summary"][1]
    assert neighbor["mean_at_n"]["value"] == 0.6875
    assert set(neighbor["difference"]) == {"mean_at_n", "pass_at_k"}
    difference = neighbor["difference"]["mean_at_n"]
    assert difference["value"] == pytest.approx(0.1875, abs=1e-4)
    assert difference["spread"] == pytest.approx(0.0625, abs=1e-4)
    assert difference["low"] == pytest.approx(0.1875 - 0.1553, abs=1e-4)
    assert difference["high"] == pytest.approx(0.1875 + 0.1553, abs=1e-4)
    assert difference["p"] == pytest.approx(0.0351, abs=1e-4)
    # gumbel has no finished seed, and is one of the two comparisons all the same.
    assert difference["comparisons"] == 2
    assert difference["p_corrected"] == pytest.approx(2 * difference["p"])
    assert neighbor["verdict"].startswith(
        "within noise: Mean@4 +0.188 [+0.032, +0.343] against none over 3 seeds (p 0.035, 0.07 corrected for 2"
    )


def test_the_change_of_the_reward_by_hand(compared: Compared) -> None:
    """From 0.1 to 0.65, 0.7, 0.75: up by 0.6 with half 4.3027 · 0.05/√3 = 0.1242."""
    change = compared.results["summary"][1]["reward_change"]
    assert change["value"] == pytest.approx(0.6, abs=1e-4)
    assert change["low"] == pytest.approx(0.6 - 0.1242, abs=1e-4)
    assert change["high"] == pytest.approx(0.6 + 0.1242, abs=1e-4)


def test_the_cost_is_of_the_steps_after_the_first(compared: Compared) -> None:
    cost = compared.results["summary"][1]["cost"]
    # 90 of 100 tokens per second; the first step of both has 1.
    assert cost["tokens_per_second"] == {"value": 90.0, "ratio": pytest.approx(0.9)}
    assert cost["memory_bytes"]["ratio"] == 1.0


def test_failed_and_pending_runs_are_listed(compared: Compared) -> None:
    gumbel = compared.results["summary"][2]
    assert gumbel["seeds"] == []
    assert gumbel["failed"] == [0]
    assert "no seed has finished" in gumbel["verdict"]
    statuses = [run["status"] for run in compared.results["runs"]]
    first_seed = ["done", "done", "failed"]
    other_seed = ["done", "done", "pending"]
    assert statuses == [*first_seed, *other_seed, *other_seed]


def test_failed_runs_stand_beside_the_verdict(compared: Compared) -> None:
    """The seed of a failed run has no pair, so a verdict is of the seeds that are left."""
    last_of_neighbor = compared.plan.runs()[7]
    record = compared.folder.read(f"runs/{last_of_neighbor.id}/run.json")
    write_json(compared.folder.run_folder(last_of_neighbor) / "run.json", {**record, "status": "failed"})

    collected = results.collect(compared.plan, compared.folder, [], "")

    verdict = collected["summary"][1]["verdict"]
    assert "over 2 seeds" in verdict
    assert verdict.endswith("; failed runs are left out: 1 of neighbor")
    assert "2 (1 failed)" in results.table(collected)


@pytest.mark.parametrize(
    ("fact", "difference"),
    [
        (("versions", "code of ngrpo"), "code of this project"),
        (("machine", "cpu"), "processor"),
        (("machine", "gpu"), "GPU"),
    ],
)
def test_runs_of_one_seed_that_differ_in_code_or_hardware_are_named(
    compared: Compared, fact: tuple[str, str], difference: str
) -> None:
    section, key = fact
    for run in compared.plan.runs()[:2]:
        path = f"runs/{run.id}/summary.json"
        summary = compared.folder.read(path)
        compared.folder.write(path, {**summary, section: {key: run.arm.id}})
    (warning,) = results.collect(compared.plan, compared.folder, [], "")["warnings"][-1:]
    assert warning.startswith(f"seed 0: its runs differ in the {difference} (neighbor, none)")


def test_evaluations_while_training_are_kept(compared: Compared) -> None:
    done, _, failed = compared.results["runs"][:3]
    assert done["evaluations"] == [
        {"step": 4, "mean_at_n": 0.25, "pass_at_n": 1.0},
        {"step": 8, "mean_at_n": 0.5, "pass_at_n": 1.0},
    ]
    assert failed["evaluations"] == []


UNTRAINED = {"n": 4, "mean_at_n": 0.0, "parsed": 0.0, "timed_out": 0.0, "cut": 1.0, "pass_at_k": {}}


def test_responses_that_say_little_stand_beside_the_scores(compared: Compared) -> None:
    """Of each run a sixteenth was cut, an eighth timed out, and an eighth more is unreadable."""
    compared.folder.write("untrained/evaluation.json", UNTRAINED)

    collected = results.collect(compared.plan, compared.folder, [], "")
    results.write(collected, compared.folder)

    assert collected["summary"][0]["unscored"] == {"cut": 0.0625, "unreadable": 0.125, "timed_out": 0.125}
    warning = "neighbor: 12% of the responses have no readable answer"
    assert warning in collected["warnings"]
    assert len(collected["warnings"]) == 6
    table = results.table(collected)
    assert "6% / 12% / 12%" in table
    assert f"warning: {warning}" in table
    page = (compared.folder.path / "report.html").read_text()
    assert page.count("6% / 12% / 12%") == 2
    assert "100% / 100% / 0%" in page, "the untrained model's"
    above_the_navigation = page.partition("<nav")[0]
    assert warning in above_the_navigation


def test_rewards_alone_compare_nothing(folder: ComparisonFolder) -> None:
    """The rollouts of a perturbed arm are drawn otherwise, so a reward of 0.9 beside 0.5 says nothing."""
    comparison = plan("--perturbations", "none,gumbel", "--seeds", "0,1,2", "--eval.data", "none")
    for number, run in enumerate(comparison.runs()):
        reward = 0.5 if run.arm.id == "none" else 0.9 + number / 100
        leave(folder, comparison, number, [1], reward=reward, evaluated=False)

    collected = results.collect(comparison, folder, [], "")

    gumbel = collected["summary"][1]
    assert gumbel["difference"] == {"mean_at_n": None, "pass_at_k": {}}
    assert gumbel["reward_last"]["value"] > 0.9
    assert gumbel["verdict"].startswith("was not compared with none")
    table = results.table(collected)
    assert "0.100 → 0.500" in table
    assert "better" not in table

    gumbel["reward_last"]["value"] = None  # JSON has no NaN, which a reward model may give
    assert "→ –" in results.table(collected)


def test_json_holds_no_nan(compared: Compared) -> None:
    run = compared.plan.runs()[0]
    summary = compared.folder.read(f"runs/{run.id}/summary.json")
    summary["steps"][0]["shift"] = float("nan")
    compared.folder.write(f"runs/{run.id}/summary.json", summary)

    collected = results.collect(compared.plan, compared.folder, [], "")

    assert collected["runs"][0]["steps"][0]["shift"] is None
    json.dumps(collected, allow_nan=False)


def test_csv_has_a_line_for_each_step(compared: Compared) -> None:
    rows = list(csv.DictReader(results.as_csv(compared.results).splitlines()))
    finished_runs = 6
    others = 3  # the failed and the pending ones have a line each
    assert len(rows) == 8 * finished_runs + others
    assert rows[6]["mean_at_n"] == ""
    assert rows[7]["mean_at_n"] == "0.5", "the evaluation after step 8"


def test_a_run_of_other_flags_is_another(compared: Compared) -> None:
    changed = plan("--perturbations", "none", "--actor.adam.lr", "1e-5")
    assert status(compared.plan, compared.plan.runs()[0], compared.folder)["status"] == "done"
    assert status(changed, changed.runs()[0], compared.folder)["status"] == "other"


def test_a_run_without_its_evaluation_is_pending(compared: Compared) -> None:
    """The message of a damaged evaluation says to delete it."""
    run = compared.plan.runs()[0]
    (compared.folder.run_folder(run) / "evaluation" / "evaluation.json").unlink()
    assert status(compared.plan, run, compared.folder)["status"] == "pending"


def test_a_damaged_record_of_a_run_is_an_error(compared: Compared) -> None:
    """A kill while writing cannot leave this, and the run's folder must not be taken for an interrupted one's."""
    run = compared.plan.runs()[0]
    (compared.folder.run_folder(run) / "run.json").write_text('{"status": "do')
    with pytest.raises(UsageError, match=r"run\.json is damaged.*delete it"):
        status(compared.plan, run, compared.folder)


def test_finished_runs_are_looked_at_again_before_each_run(
    folder: ComparisonFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset that changes while the first run trains: the second would be of other content than the first."""
    data = tmp_path / "data.jsonl"
    data.write_text("1")
    words = ("--eval.data", "none", "--data.prompt_dataset", str(data))
    comparison = plan("--perturbations", "none", "--seeds", "0,1", *words)
    executed = []

    def execute(plan: Plan, run: Any, folder: ComparisonFolder, on_step: Any) -> dict[str, Any]:
        leave(folder, plan, len(executed), [1], reward=0.5, evaluated=False)
        executed.append(run.id)
        data.write_text("2")
        return {"status": "done", "seconds": 1.0}

    monkeypatch.setattr(runs, "execute", execute)
    with pytest.raises(UsageError, match=r"1 finished runs in .* other content of the files .*: none-seed0"):
        command._compare(comparison, folder, [], lambda line: None)

    assert executed == ["none-seed0"]
    first_run = comparison.runs()[0]
    assert (folder.run_folder(first_run) / "summary.json").is_file()


@pytest.mark.parametrize(
    ("words", "arms"),
    [
        pytest.param(
            ["--perturbations", "none,gumbel", "--base", "grpo,gspo"],
            ["none base=grpo", "gumbel base=grpo"],
            id="the first base of several",
        ),
        pytest.param(
            ["--strategy", "none --rollout.temperature=0.5", "--strategy", "gumbel"],
            ["none", "gumbel"],
            id="its own temperature",
        ),
    ],
)
def test_the_diagnosis_is_of_the_arms_that_roll_out_as_it_does(words: list[str], arms: list[str]) -> None:
    """Of the sweep only the perturbation at its own temperature was diagnosed."""
    diagnosis = {"strategies": [{"name": "none"}, {"name": "gumbel"}], "samples": []}
    named = results._named(diagnosis, plan(*words).arms)
    assert [row["name"] for row in named["strategies"]] == arms


def test_more_arms_and_seeds_may_join_a_folder(folder: ComparisonFolder) -> None:
    folder.claim(plan("--perturbations", "none").common())
    folder.claim(plan("--perturbations", "none,neighbor", "--seeds", "0,1").common())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--actor.adam.lr", "1e-5"], r"shared was .* Give another --out"),
        (["--eval.n", "2"], "evaluation was"),
    ],
)
def test_another_comparison_in_the_same_folder_is_refused(
    folder: ComparisonFolder, flags: list[str], message: str
) -> None:
    folder.claim(plan("--perturbations", "none").common())
    with pytest.raises(UsageError, match=message):
        folder.claim(plan("--perturbations", "none", *flags).common())


@pytest.mark.parametrize(("flags", "kept"), [([], True), (["--discard-models"], False)], ids=["kept", "discarded"])
def test_a_trained_model_is_discarded_once_it_is_evaluated(
    folder: ComparisonFolder, monkeypatch: pytest.MonkeyPatch, flags: list[str], kept: bool
) -> None:
    has_model: dict[str, bool] = {}

    def command(words: list[str], log: Path, *_: Any) -> None:
        """Stands for a command: the training leaves a model, which the evaluation needs."""
        model = log.parent / "model"
        if words[0] == "train":
            model.mkdir()
        has_model[words[0]] = model.is_dir()

    monkeypatch.setattr(runs, "command", command)
    comparison = plan("--perturbations", "none", *flags)
    folder.lock = 0
    run = comparison.runs()[0]

    record = runs.execute(comparison, run, folder, lambda step: None)

    assert record["status"] == "done"
    assert has_model == {"train": True, "eval": True}
    assert (folder.run_folder(run) / "model").is_dir() == kept
    assert comparison.common() == plan("--perturbations", "none").common(), "the switch may change in a folder"


def test_a_difference_is_of_the_runs_that_both_arms_have() -> None:
    run = {"mean_at_n": {"p": 0.5}}
    missing: dict[str, Any] = {}
    assert summaries._differences([run, missing], [missing, run]) == {"mean_at_n": None, "pass_at_k": {}}


def test_a_difference_is_of_the_problems_that_both_runs_have() -> None:
    two_problems = {"mean_at_n": {"p0": 1.0, "p1": 0.0}}
    one_problem = {"mean_at_n": {"p0": 0.5}}
    difference = summaries._differences([two_problems], [one_problem])["mean_at_n"]
    assert difference["value"] == 0.5


def test_costs_are_of_the_same_seed_and_without_the_first_step() -> None:
    def run(memory: int, *speeds: float) -> dict[str, Any]:
        return {"peak_memory_bytes": memory, "steps": [{"tokens_per_second": speed} for speed in speeds]}

    ours = {1: run(30, 10.0, 90.0, 100.0)}
    baseline = {0: run(10), 1: run(20)}

    cost = summaries._cost(ours, baseline, [1])

    # 30 of seed 1's 20; (90 + 100) / 2 without the first step, and the baseline has no steps.
    assert cost["memory_bytes"] == {"value": 30.0, "ratio": 1.5}
    assert cost["tokens_per_second"] == {"value": 95.0, "ratio": None}


def test_an_evaluation_before_training_of_other_problems_is_made_again(
    folder: ComparisonFolder, tmp_path: Path
) -> None:
    data = tmp_path / "problems.jsonl"
    untrained = folder.path / "untrained"
    comparison = plan("--perturbations", "none", "--eval.data", str(data))
    for content in ("1", "2"):
        data.write_text(content)
        assert not runs.is_evaluated(comparison, "model", folder, untrained)
        folder.write("untrained/evaluation.json", {})
        assert runs.is_evaluated(comparison, "model", folder, untrained)
    # By another path to the same folder, as where it has moved.
    assert runs.is_evaluated(comparison, "model", folder, folder.path / ".." / folder.path.name / "untrained")


def finished_run(arm: str, seed: int, correct: int) -> dict[str, Any]:
    """A run whose evaluation has ``correct`` of ten responses right; its mean is rounded up in its last bit."""
    return {
        "strategy": arm,
        "seed": seed,
        "status": "done",
        "evaluation": {
            "problems": [{"id": "a", "n": 10, "correct": correct}],
            "mean_at_n": correct / 10 + 2e-16,
            "pass_at_k": {},
        },
        "steps": [],
        "peak_memory_bytes": None,
    }


@pytest.fixture
def five_seeds() -> list[dict[str, Any]]:
    """Of none, whose best run ends at 0.8; of "away", all at 0.9; of "some", 0.6, three at 0.9 and a failed one."""
    none = [finished_run("none", seed, 8 if seed == 0 else 6) for seed in range(5)]
    away = [finished_run("away", seed, 9) for seed in range(5)]
    some = [finished_run("some", seed, 6 if seed == 0 else 9) for seed in range(4)]
    failed = {**finished_run("some", 4, 0), "status": "failed", "evaluation": None}
    return [*none, *away, *some, failed]


def test_runs_above_a_threshold_are_counted(five_seeds: list[dict[str, Any]]) -> None:
    """Exactly the threshold is not above it, what failed is no run, and p is Holm's over the arms."""
    rows = summaries.summarise(five_seeds, ["none", "away", "some"], "none", 0.8)

    none, away, some_above = (row["above"] for row in rows)
    assert none == {"threshold": 0.8, "runs": 0, "of": 5}
    assert away["runs"] == 5
    assert away["of"] == 5
    # 5 of 5 and 0 of 5: this and its opposite, of C(10, 5) = 252; Holm's correction for two arms doubles it.
    assert away["p"] == pytest.approx(2 / 252)
    assert away["p_corrected"] == pytest.approx(4 / 252)
    assert some_above["runs"] == 3
    assert some_above["of"] == 4
    # 3 of 4 and 0 of 5: 4 ways of C(9, 3) = 84; none of the other tables (30, 40, 10 ways) is as rare.
    assert some_above["p"] == pytest.approx(4 / 84)
    assert some_above["p_corrected"] == some_above["p"]


def test_runs_above_a_threshold_in_words(five_seeds: list[dict[str, Any]]) -> None:
    none, away, _ = summaries.summarise(five_seeds, ["none", "away", "some"], "none", 0.8)
    assert none["verdict"].endswith("the baseline; 0 of 5 runs end above 0.8")
    assert "5 of 5 runs end above 0.8, of none 0 of 5 (Fisher's exact p 0.0079, 0.016 corrected" in away["verdict"]


def test_without_a_threshold_no_runs_are_counted(five_seeds: list[dict[str, Any]]) -> None:
    rows = summaries.summarise(five_seeds, ["none", "away", "some"], "none")
    assert len(rows) == 3
    assert all("above" not in row for row in rows)


def test_the_clearest_difference_is_better_on_the_page_too(tmp_path: Path) -> None:
    """Six seeds of one problem, none right and all: 2 of 2^6 patterns of signs."""
    none_right = [finished_run("none", seed, 0) for seed in range(6)]
    all_right = [finished_run("away", seed, 10) for seed in range(6)]
    runs_of_both = [*none_right, *all_right]
    rows = summaries.summarise(runs_of_both, ["none", "away"], "none")
    assert rows[1]["verdict"] == "better: Mean@10 +1.000 against none with each of 6 seeds (p 0.031)"

    data = {
        "strategies": [{"id": "none"}, {"id": "away"}],
        "runs": runs_of_both,
        "summary": rows,
        "baseline": "none",
    }
    write_report(data, tmp_path / "report.html")

    page = (tmp_path / "report.html").read_text()
    assert "Better than “none” in Mean@n beyond noise: away." in page
    assert "+1.000, beyond noise" in page
    assert "0.000 to 0.390" in page, "Wilson's interval of 0 in 6"


def test_full_disk(folder: ComparisonFolder) -> None:
    with pytest.raises(CannotWrite, match=r"GiB are free.*make room"):
        folder.need(1 << 60)
