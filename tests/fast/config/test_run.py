# SPDX-License-Identifier: Apache-2.0
"""A run as one object: there and back through its file and its text, and one table of rules for all who start runs."""

import json
import pickle
import shlex
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ngrpo import cli
from ngrpo.commands import train
from ngrpo.config import parse, run_notes
from ngrpo.config.complete_run import CompleteRun
from ngrpo.config.kinds import FLAGS, KINDS
from ngrpo.config.run import FILE, RunConfig, Sampling, current_run
from ngrpo.machine.upstream import versions
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.trainers.openrlhf import launch
from ngrpo.workbench.compare import runs
from ngrpo.workbench.compare.plan import read_plan
from perturbations.errors import UsageError
from tests.support.own_files import clean
from tests.support.recipes import METHODS, PAPERS, words_of
from tests.support.run import run_with

__all__ = ["clean"]  # each test in a folder of its own, and what it registers is gone after it

MODEL = "--model smollm2-135m --task arithmetic --hardware cpu"
OWN = """
from dataclasses import dataclass

from perturbations import option
from perturbations.gates.further import First
from perturbations.methods.gaussian import Gaussian


@dataclass(frozen=True, kw_only=True)
class Odd(First):
    paper = "none"
    word: str = option("it's 'so'", "a text with blanks and quotes")


@dataclass(frozen=True, kw_only=True)
class Damp(Gaussian):
    paper = "none"
"""
LINES = {
    "nothing of ours": "",
    "none": "--perturbation none --perturbation.replay_buffer memory",
    "a replay buffer for masks": "--sampling.correct_mask --perturbation.replay_buffer memory",
    "a replay buffer for centering": "--sampling.score_centering --perturbation.replay_buffer memory",
    "every setting": "--perturbation neighbor --perturbation.gap_limit 3.25 --perturbation.strict --reproducible"
    " --eval.at_start --report.groups 2 --replay.routing --preset dapo --sampling.top_k 7 --sampling.correct_mask"
    " --sampling.mask_gib 0.1 --perturbation.replay_buffer memory --perturbation.replay_buffer.max_bytes 77",
    "a rate that is no short decimal": "--perturbation soft --perturbation.rate 0.30000000000000004",
    "a gate": "--perturbation soft --perturbation.until 9 --perturbation.gate ./own.py:Odd",
    "one's own": "--perturbation ./own.py:Damp --perturbation.sigma 1e-5",
    "OpenRLHF's": "--actor.adam.betas 0.9 0.95 --ckpt.path= --logger.wandb.project a\\ b,c --algo.kl.use_loss"
    " --x=true --y none --z 'it''s'",
}


def through_file(run: RunConfig) -> RunConfig:
    run.write(Path(FILE))
    return parse.run_config(parse.with_files(["--config", FILE]))


@pytest.mark.parametrize("name", LINES)
def test_a_run_is_the_same_through_its_file_and_its_text(name: str) -> None:
    Path("own.py").write_text(OWN)
    run = parse.run_config(shlex.split(f"{MODEL} {LINES[name]}"))
    Path("own.py").unlink()  # the file and the text carry the source
    again = through_file(run)
    plain = [(flag.name, flag.values) for flag in Flags(run.openrlhf)]
    assert [(flag.name, flag.values) for flag in Flags(again.openrlhf)] == plain
    assert replace(again, openrlhf=run.openrlhf) == run
    assert again.flags() == run.flags()
    text = pickle.loads(pickle.dumps(run))
    assert text == run
    assert "_extensions" not in vars(text)
    for kind in run.specs:
        assert text.part(kind).spec() == again.part(kind).spec() == run.specs[kind]


@pytest.mark.parametrize("recipe", [*PAPERS, *(f"methods/{name}" for name in METHODS)])
def test_every_recipe_goes_into_the_file(recipe: str) -> None:
    run = parse.run_config(words_of(recipe))
    again = through_file(run)
    assert again.flags() == run.flags()
    assert again.specs == run.specs


def test_every_attribute_of_a_run_is_one_of_its_file() -> None:
    changed = {"specs": {"perturbation": {"name": "soft"}}, "sampling": Sampling(top_k=3), "openrlhf": ("--a", "b")}
    for setting in fields(RunConfig):
        if setting.name in ("run_dir", "log_file", "notes", "machine"):  # where, and what was said
            continue
        value = changed.get(setting.name, {bool: True}.get(type(setting.default), 3))
        assert replace(RunConfig(), **{setting.name: value}).flags() != RunConfig().flags(), setting.name


def test_a_perturbation_at_rate_0_is_none() -> None:
    """It would be taken for a run that measures the mismatch of unperturbed rollouts."""
    run = parse.run_config(["--perturbation", "neighbor", "--perturbation.rate", "0"])
    assert run.notes == ("--perturbation neighbor with rate 0 is as --perturbation none: nothing is recorded.",)
    assert run.perturbation is None
    assert parse.run_config(["--perturbation", "none"]).notes == ()


@pytest.mark.parametrize("settings", ["--perturbation.strict", "--perturbation.gap_limit 3"])
@pytest.mark.parametrize(
    ("recorded", "has_note"),
    [("--perturbation none", True), ("--perturbation neighbor", False), ("--replay.routing", False)],
)
def test_a_limit_of_a_mismatch_that_is_not_measured_is_noted(settings: str, recorded: str, has_note: bool) -> None:
    run = parse.run_config(f"{recorded} {settings}".split())
    notes = [*run_notes.gap_notes(CompleteRun(run=run, flags=Flags(())))]
    assert len(notes) == has_note
    assert all("no mismatch is measured" in note for note in notes)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """`ngrpo train` up to the launch, which is recorded instead of run."""
    started: list[RunConfig] = []
    monkeypatch.setattr("ngrpo.trainers.openrlhf.launch.launch", started.append)
    monkeypatch.setattr(versions, "check_stack", lambda: None)
    monkeypatch.setattr("ngrpo.machine.models.packaged.resolve", lambda name, report: name)
    return started


def test_a_run_leaves_the_file_that_repeats_it(launched: list[RunConfig]) -> None:
    line = f"{MODEL} --perturbation neighbor --perturbation.rate 0.25 --preset grpo --run-dir one --train.seed 5"
    line += " --rollout.n_samples_per_prompt 4 --rollout.batch_size 8"
    assert train.run(line.split(), report=print) == 0
    assert train.run(["--config", f"one/{FILE}", "--run-dir", "two"], report=print) == 0
    first, second = launched
    assert first.run_dir is not None
    assert first.run_dir.endswith("/one")

    def with_folder(words: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        return {flag.name: tuple(value.replace("two/", "one/") for value in flag.values) for flag in Flags(words)}

    assert with_folder(first.openrlhf) == with_folder(second.openrlhf)
    assert replace(first, openrlhf=(), run_dir="") == replace(second, openrlhf=(), run_dir="")
    assert Path(f"one/{FILE}").read_text() == Path(f"two/{FILE}").read_text()


def test_a_task_and_methods_add_the_flags_that_are_not_given(
    launched: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"{MODEL} --advantage ngrpo --preset gspo --sampling.min_p 0.1 --rollout.temperature 0.8 --run-dir r"
    line += " --rollout.n_samples_per_prompt 4 --actor.loss_agg_mode token-mean --eval.dataset e/f"
    assert train.run(line.split(), report=print) == 0
    (started,) = launched
    started_flags = Flags(started.openrlhf)
    advantage = {"name": "ngrpo", "n": 1, "max_reward": 1.0}
    expected = "--data.prompt_dataset r/task/train.jsonl --data.label_key label --ckpt.output_dir r/model"
    expected += " --eval.dataset e/f --actor.policy_loss_type gspo --actor.loss_agg_mode token-mean"
    for flag in Flags(expected.split()):
        assert [each.values for each in started_flags if each.name == flag.name] == [flag.values], flag.name
    said = capsys.readouterr().out
    assert "added to OpenRLHF's flags" in said
    assert "--algo.dynamic_filtering_range -1000000 0.99999" in said
    written = json.loads(Path("r/summary.json").read_text())
    sampling = {"temperature": 0.8, "top_p": 1.0, "top_k": None, "min_p": 0.1, "correct_mask": False}
    sampling["score_centering"] = False
    assert written["advantage"] == advantage
    assert written["sampling"] == sampling


def test_failed_training_is_code_1(launched: list[RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: RunConfig) -> None:
        raise launch.TrainingFailed("out of memory")

    monkeypatch.setattr(launch, "launch", fail)
    lines: list[str] = []
    assert train.run([*MODEL.split(), "--run-dir", "r"], report=lines.append) == 1
    assert "training failed: out of memory" in lines


def test_a_comparison_starts_each_run_with_such_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan, _ = read_plan(["--perturbations", "none,neighbor:rate=0.25", *MODEL.split(), "--eval.data", "none"])
    started: list[list[str]] = []
    monkeypatch.setattr(runs, "command", lambda words, *rest: started.append(words))
    with runs.ComparisonFolder.opened(tmp_path / "out", print) as folder:
        for one in plan.runs():
            runs.execute(plan, one, folder, lambda step: None)
    for one, (train_word, *rest) in zip(plan.runs(), started):
        assert train_word == "train"
        read = parse.run_config(parse.with_files(rest))
        assert read == runs.run_config(plan, one, tmp_path / "out" / "runs" / one.id)
        assert read.spec == one.arm.spec
        assert read.reproducible


BROKEN = {
    "a number": ("--train.batch_size 0", "at least 1"),
    "a combination": ("--perturbation neighbor --ds.ring_attn_size 2", "cannot be used with --perturbation neighbor"),
    "a method and a loss": ("--credit top_entropy --actor.policy_loss_type gspo", "ratio is of the whole response"),
    "the hardware": ("--vllm.enable_sleep", "cannot be used with --hardware cpu"),
    "OpenRLHF's parser": ("--train.no_such_flag 1", "no_such_flag"),
    "data": ("--data.prompt_dataset missing.jsonl", "missing.jsonl"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_dry_run_start_and_comparison_refuse_the_same(
    name: str, launched: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    line, said = BROKEN[name]
    words = f"{MODEL} {line} --rollout.batch_size 8 --rollout.n_samples_per_prompt 4".split()

    def told() -> str:
        both = capsys.readouterr()
        return " ".join((both.out + both.err).split())

    assert cli.main(["train", *words]) == 2
    error = told().rpartition("ngrpo: error: ")[2]
    assert said in error
    assert not launched
    assert cli.main(["train", *words, "--dry-run"]) in (1, 2)
    assert error in told()
    strategy = "neighbor" if "--perturbation" in line else "none"
    rest = [word for word in words if word not in ("--perturbation", "neighbor")]
    assert cli.main(["compare", "--strategy", strategy, *rest, "--out", "out"]) == 2
    assert error in told()


def test_the_run_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert current_run() == RunConfig()
    assert current_run().perturbation is None
    run_with(monkeypatch, perturbation={"name": "soft"}, advantage={"name": "ngrpo", "n": 2})
    assert current_run().perturbation is current_run().perturbation, "made once"
    assert current_run().advantage.n == 2
    assert current_run().conditions == ("perturbation", "advantage")
    with pytest.raises(UsageError, match="unknown credit"):
        RunConfig(specs={"credit": {"name": "nothing"}}).credit  # noqa: B018
    assert set(FLAGS.values()) == {kind.flag for kind in KINDS.values()}


def test_a_step_of_an_engine_has_room_for_a_token_of_each_response() -> None:
    run = parse.run_config(["--engine.max_num_seqs", "64", "--engine.max_num_batched_tokens", "64"])
    assert run.engine_limits == {"max_num_seqs": 64, "max_num_batched_tokens": 64}
    with pytest.raises(UsageError, match=r"--engine\.max_num_seqs is 65 and --engine\.max_num_batched_tokens 64"):
        parse.run_config(["--engine.max_num_seqs", "65", "--engine.max_num_batched_tokens", "64"])
