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


def has(given: Plan, number: int, line: str) -> bool:
    """Whether a run of a plan has these flags."""
    flags = run_config(given, given.runs()[number], Path("folder")).flags()
    return all(str(flags.get(flag.name[2:])) == " ".join(flag.values) for flag in Flags(line.split()))


def test_strategies_times_seeds_with_whole_seeds_first() -> None:
    made = plan("--perturbations", "none,neighbor", "--seeds", "0,1")
    assert [run.id for run in made.runs()] == ["none-seed0", "neighbor-seed0", "none-seed1", "neighbor-seed1"]
    assert made.baseline == "none"
    spelt = "--reproducible true --actor.model_name_or_path smollm2-135m --task arithmetic --train.seed 1"
    assert has(made, 3, f"{spelt} --perturbation neighbor") and has(made, 2, f"{spelt} --perturbation none")
    config = run_config(made, made.runs()[3], Path("folder"))
    assert config.run_dir == "folder" and config.spec == create("neighbor").spec()
    assert config == parse.run_config([*f"{spelt} --perturbation neighbor --run-dir folder".split()])


METRICS = "--perturbations none,neighbor --sweep perturbation.metric=cosine,l2,l1"
BASES = "--perturbations none,gumbel --sweep rollout.temperature=0.8,1.2 --base grpo,gspo"
NOISE = "none policy_noise=psn policy_noise.sigma=0.004 credit=top_entropy"
SHARED = "--perturbations none --rollout.temperature 0.7 --advantage ngrpo --reproducible --strategy"
OWN = "none --rollout.temperature=1.2 advantage=psr"


@pytest.mark.parametrize(
    ("words", "count", "number", "name", "line"),
    [
        (METRICS, 4, 2, "neighbor metric=l2", "--perturbation neighbor --perturbation.metric l2"),
        (BASES, 8, 3, "none rollout.temperature=1.2 base=gspo", "--rollout.temperature 1.2 --preset gspo"),
        (f"--strategy '{NOISE}'", 1, 0, NOISE, "--policy_noise psn --policy_noise.sigma 0.004 --credit top_entropy"),
        # An arm's own flags replace the shared ones.
        (f"{SHARED} none", 2, 0, "none", "--rollout.temperature 0.7 --advantage ngrpo --reproducible true"),
        (
            f"{SHARED} '{OWN}'",
            2,
            1,
            OWN.replace("--", ""),
            "--rollout.temperature 1.2 --advantage psr --reproducible true",
        ),
    ],
)
def test_arms(words: str, count: int, number: int, name: str, line: str) -> None:
    made = plan(*shlex.split(words))
    assert len(made.arms) == count and made.arms[number].id == name
    assert has(made, number, line)


def test_later_words_win_over_those_of_a_script() -> None:
    made = plan("--perturbations", "none,neighbor", "--seeds", "0,1", "--perturbations", "gumbel", "--seeds", "3")
    assert [run.id for run in made.runs()] == ["gumbel-seed3"]
    twice, stock = plan("--perturbations", "none,none"), plan("--perturbations", "none", "--stock")
    assert len({run.id for run in twice.runs()}) == 2
    assert has(twice, 0, "--reproducible true") and not has(stock, 0, "--reproducible true")


def test_file_and_command_line_mean_the_same(tmp_path: Path) -> None:
    file = tmp_path / "ablation.yaml"
    file.write_text(
        "strategies: [none, neighbor metric=l2]\nseeds: [0, 1]\nsweep:\n  rollout.temperature: [0.8, 1.2]\n"
        "eval: {n: 4, k: [1, 4]}\nflags: {model: smollm2-135m, task: arithmetic, algo.kl.use_loss: true}\n"
    )
    from_file = read_plan(["--config", str(file)])[0]
    given = ["--strategy", "none", "--strategy", "neighbor metric=l2", "--seeds", "0,1"]
    given += ["--sweep", "rollout.temperature=0.8,1.2", "--eval.n", "4", "--eval.k", "1,4"]
    assert from_file == read_plan([*given, *MODEL, "--algo.kl.use_loss"])[0]
    assert read_plan(["--config", str(file), "--seeds", "7"])[0].seeds == (7,)


def test_evaluation_and_diagnosis_follow_the_task() -> None:
    made = plan("--perturbations", "none,neighbor", "--eval.k", "1,8", "--rollout.max_new_tokens", "12")
    assert made.evaluation == ("--task", "arithmetic", "--n", "8", "--k", "1,8")
    assert " ".join(made.diagnosis or ()).startswith("--task arithmetic --prompts 8 --max-tokens 12 ")
    assert (made.diagnosis or ())[-4:] == ("--strategy", "none", "--strategy", "neighbor")
    bare = plan("--perturbations", "none", "--eval.data", "none", "--diagnose.prompts", "0")
    assert bare.evaluation is None and bare.diagnosis is None


def test_evaluation_while_training_is_like_the_one_after() -> None:
    """OpenRLHF's own defaults are four samples at temperature 0.6, and a checkpoint of each best evaluation."""
    words = ("--perturbations", "none", "--eval.n", "4", "--eval.temperature", "1")
    assert plan(*words).shared == tuple(MODEL)
    added = ("--eval.n_samples_per_prompt", "4", "--eval.temperature", "1", "--ckpt.best_metric_key", "none")
    assert plan(*words, "--eval.steps", "5").shared == (*added, "--eval.steps", "5", *MODEL)
    fewer = plan(*words, "--eval.steps", "5", "--eval.n_samples_per_prompt", "2").shared
    assert fewer[:4] == ("--eval.temperature", "1", "--ckpt.best_metric_key", "none")


def test_evaluation_is_unperturbed_unless_the_perturbation_is_part_of_the_policy() -> None:
    made = plan("--perturbations", "neighbor,hrpo:k=4")
    neighbor, hrpo = (" ".join(eval_argv(made, "model", Path("out"), arm)) for arm in made.arms)
    assert "--perturbation" not in neighbor
    assert "--perturbation hrpo --perturbation.k 4" in hrpo


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
    own = tmp_path / "reading.py"
    own.write_text(READING)
    (tmp_path / "model").mkdir()
    names = ("r.py", "a", "b", "held.jsonl", "d.pt", "model/model.safetensors")
    files = reward, first, second, held, directions, _ = [tmp_path / name for name in names]
    for file in files:
        file.write_text("1")

    def seen(*more: str) -> str:
        words = ["--model", str(tmp_path / "model"), f"--reward.remote_url={reward}", "--eval.data", str(held), *more]
        words += ["--data.prompt_dataset", f"{first},{second}"]
        made = read_plan(["--strategy", f"{own}:Reading directions={directions}", *words])[0]
        return identity(made, made.runs()[0])

    known = {seen()}
    assert seen() in known and seen("--actor.adam.lr", "1e-5") not in known
    for file in files:
        file.write_text("2")
        assert seen() not in known, file
        known.add(seen())
    own.write_text(READING.replace("none", "another"))
    assert seen() not in known


@pytest.mark.parametrize(
    ("words", "pinned"),
    [
        ("--perturbations none", "1a59277e74b490a1"),
        ("--perturbations neighbor:rate=0.2", "2da266a022e96ec3"),
        ("--strategy 'none --rollout.temperature=0.8' --eval.n 4 --eval.temperature 1 --seeds 3", "edb0d581da187445"),
    ],
)
def test_the_identity_of_a_usual_run_stays(words: str, pinned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished runs of a study are kept by it. A new option of a perturbation or a default changes it, and only then
    are these numbers to be written anew."""
    monkeypatch.setattr("ngrpo.workbench.compare.runs.versions", lambda runner: {"ngrpo": "0.1.0"})
    made = plan(*shlex.split(words))
    assert identity(made, made.runs()[0]) == pinned


@pytest.mark.parametrize(
    ("given", "message"),
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
        (["--perturbations", "none", "--threshold", "0.8", "--eval.data", "none"], "0.8 counts evaluated runs"),
    ],
)
def test_bad_input_is_one_clear_error(given: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(*given)


def test_bad_file(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("perturbation: none")
    with pytest.raises(UsageError, match="Did you mean 'perturbations'"):
        read_plan(["--config", str(file), *MODEL])


_TWO = "perturbations: none,neighbor\n"


@pytest.mark.parametrize(
    ("text", "said"),
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
def test_texts_that_yaml_reads_otherwise(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=rf"--config \S+plan\.yaml: .*{said}"):
        read_plan(["--config", str(file), *MODEL])


def test_quoted_texts_and_switches_of_a_file_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    quoted = (
        f'{_TWO}sweep:\n  perturbation.until: ["no", "####"]\nflags: {{algo.kl.use_loss: yes, reproducible: off}}\n'
    )
    file.write_text(quoted)
    made = read_plan(["--config", str(file), *MODEL])[0]
    assert [arm.options["until"] for arm in made.arms] == ["no", "####"] * 2
    file.write_text("perturbations: neighbor\nsweep:\n  perturbation.skip_special: [yes, no]\n")
    made = read_plan(["--config", str(file), *MODEL])[0]
    assert [arm.options["skip_special"] for arm in made.arms] == ["true", "false"]
    file.write_text(f"{_TWO}flags:\n  hardware: off\n")
    assert "cpu" in read_plan(["--config", str(file), "--hardware", "cpu", *MODEL])[0].shared


def test_bad_problems_are_found_before_anything_is_trained(tmp_path: Path) -> None:
    file = tmp_path / "held_out.jsonl"
    file.write_text('{"input": "1+1?", "label": "2"}\n{"input": "2+2?", "label": ""}\n')
    words = ["--perturbations", "none", "--out", str(tmp_path / "out"), "--eval.data", str(file), *MODEL]
    with pytest.raises(UsageError, match=r"(?s)evaluation: .*row 2"):
        command.run(words, report=print)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--eval.n", "0"], "evaluation: n=0: must be at least 1"),
        (["--diagnose.group", "1"], "diagnosis: sampling option group=1"),
        (["--sweep", "nope=1,2"], "arm 'none nope=1': unknown flag '--nope'"),
        (["--sweep", "rollout.top_p=0.5,abc"], "rollout.top_p=abc': --rollout.top_p abc: must be a number"),
    ],
)
def test_what_a_later_command_would_refuse_is_refused_at_once(given: list[str], message: str) -> None:
    shared = [*MODEL, "--hardware", "cpu", "--algo.advantage.estimator", "reinforce"]
    with pytest.raises(UsageError, match=message):
        command.check(read_plan(["--perturbations", "none", *shared, *given])[0], Path("out"), print)
    command.check(read_plan(["--perturbations", "none", *shared])[0], Path("out"), print)


def test_a_folder_s_name_is_short_and_not_hidden() -> None:
    """File systems take 255 bytes; two labels of the same beginning stay apart."""
    names = {folder_name("x" * length) for length in (80, 300, 301)}
    assert len(names) == 3 and max(map(len, names)) == 87
    for label in ("./a/boom.py:Boom", "../boom.py:Boom", ".hidden/boom.py:Boom rate=0.1"):
        assert folder_name(label)[0].isalpha() and "boom.py-Boom" in folder_name(label)


def test_a_strategy_given_twice_is_told() -> None:
    arms = plan("--perturbations", "none,neighbor,neighbor:rate=0.1,neighbor:rate=0.2,gumbel:rate=0").arms
    told = {arm.id: note for arm in arms for note in arm.notes}
    assert told["neighbor rate=0.1"].startswith("the same arm as 'neighbor'")
    assert told["gumbel rate=0"].startswith("the same arm as 'none'") and len(told) == 2


@pytest.mark.parametrize(
    ("more", "said"), [("", False), ("--eval.temperature 0", True), ("--eval.temperature 0 --eval.n 1", False)]
)
def test_greedy_samples_are_one(more: str, said: bool, tmp_path: Path) -> None:
    told: list[str] = []
    words = "--perturbations none --diagnose.prompts 0 --hardware cpu"
    command.check(plan(*words.split(), *more.split()), tmp_path, told.append)
    assert any("at temperature 0 the 8 samples of a problem are one response" in line for line in told) == said
