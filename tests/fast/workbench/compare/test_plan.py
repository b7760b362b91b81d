# SPDX-License-Identifier: Apache-2.0
"""The command line and the YAML file of `ngrpo compare`, made into runs."""

import shlex
from pathlib import Path

import pytest

from ngrpo.commands import compare as command
from ngrpo.config import parse
from ngrpo.machine.upstream.openrlhf_flags import Flags
from ngrpo.workbench.compare.plan import Plan, folder_name, read_plan
from ngrpo.workbench.compare.runs import eval_argv, identity, run_config
from perturbations import create
from perturbations.errors import UsageError

MODEL = ["--model", "smollm2-135m", "--task", "arithmetic"]


def plan(*words: str) -> Plan:
    return read_plan([*words, *MODEL])[0]


def has_flags(comparison: Plan, number: int, line: str) -> bool:
    """Whether run ``number`` of a plan has the flags of ``line``."""
    flags = run_config(comparison, comparison.runs()[number], Path("folder")).flags()
    return all(str(flags.get(flag.name[2:])) == " ".join(flag.values) for flag in Flags(line.split()))


def test_arms_times_seeds_with_all_arms_of_a_seed_first() -> None:
    comparison = plan("--perturbations", "none,neighbor", "--seeds", "0,1")
    assert [run.id for run in comparison.runs()] == [
        "none-seed0",
        "neighbor-seed0",
        "none-seed1",
        "neighbor-seed1",
    ]
    assert comparison.baseline == "none"


def test_a_run_is_the_training_of_its_flags() -> None:
    comparison = plan("--perturbations", "none,neighbor", "--seeds", "0,1")
    shared = "--reproducible true --actor.model_name_or_path smollm2-135m --task arithmetic --train.seed 1"
    assert has_flags(comparison, 2, f"{shared} --perturbation none")
    assert has_flags(comparison, 3, f"{shared} --perturbation neighbor")

    config = run_config(comparison, comparison.runs()[3], Path("folder"))

    assert config.run_dir == "folder"
    assert config.spec == create("neighbor").spec()
    training = f"{shared} --perturbation neighbor --run-dir folder"
    assert config == parse.run_config(training.split())


NOISE = "none policy_noise=psn policy_noise.sigma=0.004 credit=top_entropy"
SHARED = "--perturbations none --rollout.temperature 0.7 --advantage ngrpo --reproducible --strategy"


@pytest.mark.parametrize(
    ("words", "arms", "number", "name", "flags"),
    [
        pytest.param(
            "--perturbations none,neighbor --sweep perturbation.metric=cosine,l2,l1",
            4,
            2,
            "neighbor metric=l2",
            "--perturbation neighbor --perturbation.metric l2",
            id="a sweep of an option, which none does not have",
        ),
        pytest.param(
            "--perturbations none,gumbel --sweep rollout.temperature=0.8,1.2 --base grpo,gspo",
            8,
            3,
            "none rollout.temperature=1.2 base=gspo",
            "--rollout.temperature 1.2 --preset gspo",
            id="a sweep of a flag, times bases",
        ),
        pytest.param(
            f"--strategy '{NOISE}'",
            1,
            0,
            NOISE,
            "--policy_noise psn --policy_noise.sigma 0.004 --credit top_entropy",
            id="methods of an arm",
        ),
        pytest.param(
            f"{SHARED} none",
            2,
            0,
            "none",
            "--rollout.temperature 0.7 --advantage ngrpo --reproducible true",
            id="shared flags",
        ),
        pytest.param(
            f"{SHARED} 'none --rollout.temperature=1.2 advantage=psr'",
            2,
            1,
            "none rollout.temperature=1.2 advantage=psr",
            "--rollout.temperature 1.2 --advantage psr --reproducible true",
            id="an arm's own flags replace the shared ones",
        ),
    ],
)
def test_arms(words: str, arms: int, number: int, name: str, flags: str) -> None:
    comparison = plan(*shlex.split(words))
    assert len(comparison.arms) == arms
    assert comparison.arms[number].id == name
    assert has_flags(comparison, number, flags)


def test_later_words_win_over_those_of_a_script() -> None:
    script = ("--perturbations", "none,neighbor", "--seeds", "0,1")
    comparison = plan(*script, "--perturbations", "gumbel", "--seeds", "3")
    assert [run.id for run in comparison.runs()] == ["gumbel-seed3"]


def test_two_runs_of_one_arm_have_ids_of_their_own() -> None:
    twice = plan("--perturbations", "none,none")
    assert len({run.id for run in twice.runs()}) == 2


def test_runs_are_reproducible_unless_stock_is_asked_for() -> None:
    assert has_flags(plan("--perturbations", "none"), 0, "--reproducible true")
    assert not has_flags(plan("--perturbations", "none", "--stock"), 0, "--reproducible true")


ABLATION = """
strategies: [none, neighbor metric=l2]
seeds: [0, 1]
sweep:
  rollout.temperature: [0.8, 1.2]
eval: {n: 4, k: [1, 4]}
flags: {model: smollm2-135m, task: arithmetic, algo.kl.use_loss: true}
"""


def test_file_and_command_line_mean_the_same(tmp_path: Path) -> None:
    file = tmp_path / "ablation.yaml"
    file.write_text(ABLATION)
    from_file, _ = read_plan(["--config", str(file)])
    words = ["--strategy", "none", "--strategy", "neighbor metric=l2", "--seeds", "0,1"]
    words += ["--sweep", "rollout.temperature=0.8,1.2", "--eval.n", "4", "--eval.k", "1,4"]
    from_command_line, _ = read_plan([*words, *MODEL, "--algo.kl.use_loss"])
    assert from_file == from_command_line


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "ablation.yaml"
    file.write_text(ABLATION)
    comparison, _ = read_plan(["--config", str(file), "--seeds", "7"])
    assert comparison.seeds == (7,)


def test_evaluation_and_diagnosis_follow_the_task() -> None:
    comparison = plan("--perturbations", "none,neighbor", "--eval.k", "1,8", "--rollout.max_new_tokens", "12")
    assert comparison.evaluation == ("--task", "arithmetic", "--n", "8", "--k", "1,8")
    assert comparison.diagnosis is not None
    assert comparison.diagnosis[:6] == ("--task", "arithmetic", "--prompts", "8", "--max-tokens", "12")
    assert comparison.diagnosis[-4:] == ("--strategy", "none", "--strategy", "neighbor")


DATASET = "--model smollm2-135m --data.prompt_dataset p.jsonl --eval.dataset e.jsonl"


def plan_of_dataset(words: str) -> Plan:
    """The plan of a comparison of two arms on datasets, without a task."""
    return read_plan(shlex.split(f"--perturbations none,neighbor {DATASET} {words}"))[0]


def test_the_training_s_problems_are_read_and_scored_as_the_training_does() -> None:
    words = "--data.input_key question --data.label_key gold --reward.remote_url r.py --data.prompt_split a"
    comparison = plan_of_dataset(f"{words} --eval.split b")
    evaluation = Flags(comparison.evaluation or ())
    diagnosis = Flags(comparison.diagnosis or ())
    settings = {"--input-key": "question", "--label-key": "gold", "--scorer": "r.py", "--instruction": ""}
    for name, value in settings.items():
        assert evaluation.value(name) == diagnosis.value(name) == value
    assert [evaluation.value(name) for name in ("--data", "--split")] == ["e.jsonl", "b"]
    assert [diagnosis.value(name) for name in ("--data", "--split")] == ["p.jsonl", "a"]
    assert comparison.notes == ()


def test_a_dataset_with_splits_is_evaluated_by_the_split_that_the_training_reads() -> None:
    """OpenRLHF reads the split train unless another is named, and `ngrpo eval` would prefer a test split."""
    flags = Flags(plan_of_dataset("--eval.dataset owner/name --reward.remote_url r.py").evaluation or ())
    assert flags.value("--split") == "train"
    assert not Flags(plan_of_dataset("--reward.remote_url r.py").evaluation or ()).has("--split")


def test_options_of_the_evaluation_override_those_of_the_training() -> None:
    words = "--data.label_key gold --reward.remote_url r.py"
    own = plan_of_dataset(f"{words} --eval.label-key answer --eval.scorer math --diagnose.instruction Think.")
    assert [Flags(own.evaluation or ()).value(name) for name in ("--label-key", "--scorer")] == ["answer", "math"]
    assert Flags(own.diagnosis or ()).value("--instruction") == "Think."
    other_problems = plan_of_dataset(f"{words} --eval.data aime2025")
    assert other_problems.evaluation == ("--n", "8", "--data", "aime2025")


@pytest.mark.parametrize(
    "reward",
    [
        "--reward.remote_url http://localhost:5000/score",
        "--reward.model_name_or_path a/judge",
        "--train.agent_func_path agent.py",
    ],
)
def test_a_reward_that_is_no_scorer_is_warned_of(reward: str) -> None:
    comparison = plan_of_dataset(reward)
    of_evaluation, of_diagnosis = comparison.notes
    assert of_evaluation.startswith("without --eval.scorer the problems of --eval.dataset e.jsonl are scored by math")
    assert f"not by the training's {reward}" in of_evaluation
    assert of_diagnosis.startswith("without --diagnose.scorer the problems of --data.prompt_dataset p.jsonl")
    assert not Flags(comparison.evaluation or ()).has("--scorer")
    others = "--eval.scorer math --diagnose.data aime2025"
    assert plan_of_dataset(f"{reward} {others}").notes == ()
    assert plan_of_dataset(f"{reward} --eval.data none --diagnose.prompts 0").notes == ()


def test_a_warning_of_the_plan_is_printed() -> None:
    messages: list[str] = []
    words = f"--perturbations none {DATASET} --hardware cpu --reward.remote_url http://localhost:9/score"
    with pytest.raises(UsageError, match=r"p\.jsonl: there is no such file"):
        command.run(shlex.split(words), report=messages.append)
    assert messages[0].startswith("warning: without --eval.scorer")


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        pytest.param("", False, id="the evaluation of the trained models alone reads it"),
        pytest.param("--eval.steps 2", True, id="the trainings evaluate"),
        pytest.param("--strategy 'none --eval.at_start=true'", True, id="the training of an arm evaluates"),
        pytest.param("--eval.data aime2025", True, id="nothing reads it, as a warning says"),
    ],
)
def test_trainings_that_do_not_evaluate_are_not_given_the_dataset_of_the_evaluation(words: str, kept: bool) -> None:
    """`ngrpo train` warns of a dataset without evaluations that nothing would be evaluated."""
    assert Flags(plan_of_dataset(f"--eval.split b {words}").shared).has("--eval.dataset", "--eval.split") == kept


def test_evaluation_and_diagnosis_can_be_left_out() -> None:
    bare = plan("--perturbations", "none", "--eval.data", "none", "--diagnose.prompts", "0")
    assert bare.evaluation is None
    assert bare.diagnosis is None


def test_evaluation_while_training_is_like_the_one_after() -> None:
    """OpenRLHF's own defaults are four samples at temperature 0.6, and a checkpoint of each best evaluation."""
    words = ("--perturbations", "none", "--eval.n", "4", "--eval.temperature", "1")
    added = ("--eval.n_samples_per_prompt", "4", "--eval.temperature", "1", "--ckpt.best_metric_key", "none")
    assert plan(*words).shared == tuple(MODEL), "without an evaluation while training nothing is added"
    assert plan(*words, "--eval.steps", "5").shared == (*added, "--eval.steps", "5", *MODEL)


def test_a_flag_of_the_evaluation_while_training_is_kept() -> None:
    words = ("--perturbations", "none", "--eval.n", "4", "--eval.temperature", "1")
    fewer = plan(*words, "--eval.steps", "5", "--eval.n_samples_per_prompt", "2").shared
    assert fewer[:4] == ("--eval.temperature", "1", "--ckpt.best_metric_key", "none")


def test_evaluation_is_unperturbed_unless_the_perturbation_is_part_of_the_policy() -> None:
    comparison = plan("--perturbations", "neighbor,hrpo:k=4")
    neighbor_arm, hrpo_arm = comparison.arms
    neighbor = " ".join(eval_argv(comparison, "model", Path("out"), neighbor_arm))
    hrpo = " ".join(eval_argv(comparison, "model", Path("out"), hrpo_arm))
    assert "--perturbation" not in neighbor
    assert "--perturbation hrpo --perturbation.k 4" in hrpo


def test_seeds_are_evaluated_with_draws_of_their_own_which_their_arms_share() -> None:
    for words, seeds in (((), ["3", "4"]), (("--eval.seed", "7"), ["7", "7"])):
        comparison = plan("--perturbations", "neighbor,gumbel", "--seeds", "3,4", *words)
        drawn = []
        for run in comparison.runs():
            drawn.append(Flags(eval_argv(comparison, "m", Path("out"), run.arm, run.seed)).value("--seed"))
        assert sorted(drawn) == sorted(seeds * len(comparison.arms))


READING = """
from dataclasses import dataclass
from perturbations.options import option
from perturbations.methods.gaussian import Gaussian

@dataclass(frozen=True, kw_only=True)
class Reading(Gaussian):
    paper = "none"
    directions: str = option("", "a file of directions")
"""


def test_a_run_is_another_when_a_file_of_it_changes(tmp_path: Path) -> None:
    """The reward function, each of several datasets, problems, a perturbation's source and a file that it names, the
    model's weights; and any flag."""
    perturbation = tmp_path / "reading.py"
    perturbation.write_text(READING)
    (tmp_path / "model").mkdir()
    reward = tmp_path / "r.py"
    first_dataset = tmp_path / "a"
    second_dataset = tmp_path / "b"
    held_out = tmp_path / "held.jsonl"
    directions = tmp_path / "d.pt"
    weights = tmp_path / "model" / "model.safetensors"
    files = (reward, first_dataset, second_dataset, held_out, directions, weights)
    for file in files:
        file.write_text("1")
    words = ["--strategy", f"{perturbation}:Reading directions={directions}"]
    words += ["--model", str(tmp_path / "model"), f"--reward.remote_url={reward}", "--eval.data", str(held_out)]
    words += ["--data.prompt_dataset", f"{first_dataset},{second_dataset}"]

    def run_identity(*more: str) -> str:
        comparison, _ = read_plan([*words, *more])
        return identity(comparison, comparison.runs()[0])

    seen = {run_identity()}
    assert run_identity() in seen
    assert run_identity("--actor.adam.lr", "1e-5") not in seen
    for file in files:
        file.write_text("2")
        changed = run_identity()
        assert changed not in seen, file
        seen.add(changed)
    perturbation.write_text(READING.replace("none", "another"))
    assert run_identity() not in seen


@pytest.mark.parametrize(
    ("words", "pinned"),
    [
        ("--perturbations none", "1a59277e74b490a1"),
        ("--perturbations neighbor:rate=0.2", "2da266a022e96ec3"),
        ("--strategy 'none --rollout.temperature=0.8' --eval.n 4 --eval.temperature 1 --seeds 3", "edb0d581da187445"),
    ],
)
def test_the_identity_of_a_usual_run_stays(words: str, pinned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished runs of a study are kept by their identity. A new option of a perturbation or a changed default changes
    it, and only then are these numbers to be written anew."""
    monkeypatch.setattr("ngrpo.workbench.compare.runs.versions", lambda runner: {"ngrpo": "0.1.0"})
    comparison = plan(*shlex.split(words))
    assert identity(comparison, comparison.runs()[0]) == pinned


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--perturbations", "none,neighbour"], "Did you mean 'neighbor'"),
        (["--perturbations", "none", "--seeds", "0,0"], "given twice"),
        (["--perturbations", "none", "--baseline", "neighbor"], "none of the arms"),
        (["--perturbations", "none", "--train.seed", "3"], "give --seeds"),
        (["--perturbations", "none", "--perturbation.rate", "0.2"], "--sweep perturbation.OPTION"),
        (["--perturbations", "none", "--ckpt.path", "x"], "give --out DIR"),
        (["--perturbation", "none"], "--perturbations, --strategy"),
        (["none"], "unexpected word 'none'"),
        (["--perturbatons", "none"], "Did you mean '--perturbations'"),
        (["--perturbations", "none", "--eval.model", "x"], "set by ngrpo compare"),
        (["--perturbations", "none", "--sweep", "eval.temperature=0.6,1"], "Give --eval.temperature once"),
        (["--strategy", "none --diagnose.group=4"], "Give --diagnose.group once"),
        (["--perturbations", "none", "--threshold", "0.8", "--eval.data", "none"], "0.8 counts evaluated runs"),
    ],
)
def test_bad_words_are_one_clear_error(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(*words)


def test_an_unknown_key_of_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("perturbation: none")
    with pytest.raises(UsageError, match="Did you mean 'perturbations'"):
        read_plan(["--config", str(file), *MODEL])


_TWO = "perturbations: none,neighbor\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{_TWO}sweep:\n  perturbation.until: no\n", r'perturbation\.until takes a text .*until: "no"'),
        (f"{_TWO}sweep:\n  perturbation.until: [stop, no]\n", "until takes a text or a number"),
        (f"{_TWO}sweep:\n  perturbation.until: ####\n", r'until. has no value\. .*quote .*until: "####"'),
        (f"{_TWO}sweep:\n  perturbation.until: [stop, null]\n", "item 2 of the key 'perturbation.until' has no value"),
        (f"{_TWO}flags:\n  rollout.temperature:\n", "'rollout.temperature' has no value"),
        (f"{_TWO}flags:\n  rollout.temperature: {{min: 1}}\n", "flags: rollout.temperature: holds lines of its own"),
        (f"{_TWO}flags:\n  hardware: off\n", r'hardware takes a text .*hardware: "no"'),
        (f"{_TWO}flags:\n  advantage: no\n", "advantage takes a name .*advantage: none is off"),
        (f"{_TWO}flags: {{advantage: pkpo, advantage.k_change: no}}\n", "advantage.k_change takes a text or a number"),
        ("strategies:\n  - none\n  -\n", "item 2 of the key 'strategies' has no value"),
        ("strategies: [none, no]\n", "strategies has False, and takes texts .*quote the text"),
        ("strategies:\n  - none\n  - neighbor until: no\n", "strategies has {'neighbor until': False}, and takes"),
        ("perturbations: [neighbor, off]\n", "perturbations has False, and takes texts"),
    ],
)
def test_texts_that_yaml_reads_otherwise_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=rf"--config \S+plan\.yaml: .*{message}"):
        read_plan(["--config", str(file), *MODEL])


def plan_of_file(tmp_path: Path, text: str, *words: str) -> Plan:
    """The plan of a file with ``text``, and of ``words`` after it."""
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    comparison, _ = read_plan(["--config", str(file), *words, *MODEL])
    return comparison


def test_quoted_texts_and_switches_of_a_file_are_read(tmp_path: Path) -> None:
    text = f'{_TWO}sweep:\n  perturbation.until: ["no", "####"]\nflags: {{algo.kl.use_loss: yes, reproducible: off}}\n'
    comparison = plan_of_file(tmp_path, text)
    assert [arm.options["until"] for arm in comparison.arms] == ["no", "####"] * 2


def test_switches_of_a_swept_option_are_read(tmp_path: Path) -> None:
    text = "perturbations: neighbor\nsweep:\n  perturbation.skip_special: [yes, no]\n"
    comparison = plan_of_file(tmp_path, text)
    assert [arm.options["skip_special"] for arm in comparison.arms] == ["true", "false"]


def test_a_bad_value_of_a_file_that_the_command_line_replaces_is_not_read(tmp_path: Path) -> None:
    text = f"{_TWO}flags:\n  hardware: off\n"
    assert "cpu" in plan_of_file(tmp_path, text, "--hardware", "cpu").shared


def test_the_command_line_stands_in_place_of_the_file_for_flags_of_ours_too(tmp_path: Path) -> None:
    text = f"{_TWO}flags: {{sampling.top_k: 50, algo.kl.use_loss: false}}\nsweep:\n  perturbation.rate: [0.1, 0.2]\n"
    words = ["--sampling.top_k", "20", "--algo.kl.use_loss", "--sweep", "perturbation.rate=0.3"]
    comparison = plan_of_file(tmp_path, text, *words)
    shared = Flags(comparison.shared)
    assert [flag.values for flag in shared if flag.name == "--sampling.top_k"] == [("20",)]
    assert shared.without_false().has("--algo.kl.use_loss")
    assert [arm.options.get("rate") for arm in comparison.arms] == [None, "0.3"]


def test_settings_of_the_mismatch_are_those_of_all_runs() -> None:
    shared = Flags(
        plan("--perturbations", "none,neighbor", "--perturbation.strict", "--perturbation.gap_limit", "5").shared
    )
    assert shared.has("--perturbation.strict")
    assert shared.value("--perturbation.gap_limit") == "5"


def test_a_training_without_the_template_of_its_task_is_evaluated_and_diagnosed_without_it() -> None:
    words = ["--data.apply_chat_template", "false", "--rollout.temperature", "false"]
    comparison = plan("--perturbations", "none", "--task", "arithmetic", *words)
    assert Flags(eval_argv(comparison, "m", Path("out"))).value("--input-template") == "{}"
    diagnosis = Flags(comparison.diagnosis or ())
    assert diagnosis.value("--input-template") == "{}"
    assert not diagnosis.has("--temperature")


def test_bad_problems_are_found_before_anything_is_trained(tmp_path: Path) -> None:
    file = tmp_path / "held_out.jsonl"
    file.write_text('{"input": "1+1?", "label": "2"}\n{"input": "2+2?", "label": ""}\n')
    words = ["--perturbations", "none", "--out", str(tmp_path / "out"), "--eval.data", str(file), *MODEL]
    with pytest.raises(UsageError, match=r"(?s)evaluation: .*row 2"):
        command.run(words, report=print)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--eval.n", "0"], "evaluation: --n 0: must be at least 1"),
        (["--diagnose.group", "1"], "diagnosis: sampling option group=1"),
        (["--sweep", "nope=1,2"], "arm 'none nope=1': unknown flag '--nope'"),
        (["--sweep", "rate=0.1,0.2"], "--sweep rate=0.1,0.2: .* as --sweep perturbation.rate=0.1,0.2"),
        (["--sweep", "rollout.top_p=0.5,abc"], "rollout.top_p=abc': --rollout.top_p abc: must be a number"),
    ],
)
def test_what_a_later_command_would_refuse_is_refused_at_once(words: list[str], message: str) -> None:
    shared = ["--perturbations", "none", *MODEL, "--hardware", "cpu", "--algo.advantage.estimator", "reinforce"]
    with pytest.raises(UsageError, match=message):
        command.check(read_plan([*shared, *words])[0], Path("out"), print)
    command.check(read_plan(shared)[0], Path("out"), print)


def test_a_folder_s_name_is_short() -> None:
    """File systems take 255 bytes; two labels of the same beginning stay apart."""
    names = {folder_name("x" * length) for length in (80, 300, 301)}
    assert len(names) == 3
    assert max(map(len, names)) == 87


@pytest.mark.parametrize("label", ["./a/boom.py:Boom", "../boom.py:Boom", ".hidden/boom.py:Boom rate=0.1"])
def test_a_folder_s_name_is_not_hidden(label: str) -> None:
    name = folder_name(label)
    assert name[0].isalpha()
    assert "boom.py-Boom" in name


def test_arms_that_are_the_same_are_noted() -> None:
    arms = plan("--perturbations", "none,neighbor,neighbor:rate=0.1,neighbor:rate=0.2,gumbel:rate=0").arms
    notes = {arm.id: arm.notes for arm in arms if arm.notes}
    assert notes.keys() == {"neighbor rate=0.1", "gumbel rate=0"}
    (of_the_default_rate,) = notes["neighbor rate=0.1"]
    assert of_the_default_rate.startswith("the same arm as 'neighbor'")
    (of_no_rate,) = notes["gumbel rate=0"]
    assert of_no_rate.startswith("the same arm as 'none'")


@pytest.mark.parametrize("values", ["1e-6,0.000001", "0.9 0.95,0.90 0.950"])
def test_numbers_that_are_written_otherwise_are_the_same_arm(values: str) -> None:
    first, second = plan("--perturbations", "none", "--sweep", f"actor.adam.x={values}").arms
    assert not first.notes
    assert second.notes == (f"the same arm as {first.id!r}, run and counted twice",)


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        pytest.param("", False, id="at the usual temperature"),
        pytest.param("--eval.temperature 0", True, id="greedy"),
        pytest.param("--eval.temperature 0 --eval.n 1", False, id="greedy, one sample"),
    ],
)
def test_several_greedy_samples_are_warned_of(words: str, warned: bool, tmp_path: Path) -> None:
    messages: list[str] = []
    shared = "--perturbations none --diagnose.prompts 0 --hardware cpu"
    command.check(plan(*shared.split(), *words.split()), tmp_path, messages.append)
    warning = "at temperature 0 the 8 samples of a problem are one response"
    assert any(warning in message for message in messages) == warned
