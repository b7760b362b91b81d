# SPDX-License-Identifier: Apache-2.0
"""The folder of an evaluation: resuming, refusals, a full disk; with a made-up engine instead of vLLM's."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ngrpo.commands.eval import run
from ngrpo.config import parse
from ngrpo.machine.models import packaged
from ngrpo.machine.storage.result_folder import read_json
from ngrpo.machine.upstream import versions
from ngrpo.methods.scoring import reward_calls
from ngrpo.workbench.evaluate import Problem, Sampling, evaluate, evaluation, rescore, score
from ngrpo.workbench.evaluate import engine as engines
from ngrpo.workbench.evaluate.engine import Generated
from perturbations.errors import UsageError
from perturbations.seeds import trajectory_seed

PROBLEMS = [
    Problem("p1", ({"role": "user", "content": "1 + 1?"},), "2", "task:arithmetic"),
    Problem("p2", ({"role": "user", "content": "2 + 2?"},), "4", "task:arithmetic"),
]
NEVER = 10**9

ENDS_RIGHT = """def reward_func(queries, prompts, labels):
    return {'rewards': [float(queries[0].removeprefix(prompts[0]).endswith('.<end>'))]}
"""
ALWAYS_RIGHT = """def reward_func(queries, prompts, labels):
    return {'rewards': [1.0]}
"""
SAYS_99 = """def reward_func(queries, prompts, labels):
    return {'rewards': ['99' in queries[0]]}
"""


class MadeUp:
    """Stands for a vllm.LLM: sample 0 of each problem is right, and so is sample 1 of the first.

    Attributes:
        generated: how many responses it has generated.
        stop_after: after how many it is interrupted.
        seeds: of the jobs that it was given last.
        settings: what else it was told then.
    """

    def __init__(self) -> None:
        self.generated = 0
        self.stop_after = NEVER
        self.seeds: list[int] = []
        self.settings: dict[str, Any] = {}
        answers = {"perturbation_fingerprint": ["{}"], "perturbation_runner": ["V2"]}
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(model="made-up"), collective_rpc=lambda method, args=(): answers[method]
        )

    def get_tokenizer(self) -> Any:
        """One token for each letter; an end token is written only with the special tokens."""
        return SimpleNamespace(
            chat_template=None,
            encode=lambda text, **_: [ord(letter) for letter in text],
            decode=lambda tokens, skip_special_tokens: "" if skip_special_tokens else "<end>" * len(tokens),
        )

    def generate(self, llm: Any, jobs: Any, sampling: Any, **settings: Any) -> Iterator[list[Generated]]:
        self.seeds = [seed for _, seed, _ in jobs]
        self.settings = settings
        for place, (tokens, _, sample) in enumerate(jobs):
            if self.generated >= self.stop_after:
                raise KeyboardInterrupt
            self.generated += 1
            number = int(chr(tokens[0]))
            is_right = sample < 3 - number
            result = 2 * number if is_right else 99
            finish = "length" if sample == 2 else "stop"
            yield [Generated(place, f"It is {result}.", [0] * 5, finish, None)]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    made_up = MadeUp()
    monkeypatch.setattr(engines, "generate", made_up.generate)
    monkeypatch.setattr(engines, "prepare", lambda llm, spec: True)
    return made_up


def lines(folder: Path) -> list[str]:
    return (folder / "samples.jsonl").read_text().splitlines()


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(folder)]


def scored_by(scorer: Path) -> list[Problem]:
    """The problems with a reward file in place of their task's scorer."""
    return [replace(problem, scorer=str(scorer)) for problem in PROBLEMS]


def test_result_by_hand(llm: MadeUp, tmp_path: Path) -> None:
    """p1: 2 of 3 right, p2: 1 of 3. Pass@2: p1 1 - C(1,2)/C(3,2) = 1, p2 1 - C(2,2)/C(3,2) = 2/3."""
    result = evaluate(llm, PROBLEMS, out=tmp_path, n=3, k=[1, 2, 3], dataset="sums")
    assert result["mean_at_n"] == pytest.approx(1 / 2)
    assert result["pass_at_k"] == pytest.approx({"1": 1 / 2, "2": 5 / 6, "3": 1.0})
    assert result["problems"] == [
        {"id": "p1", "n": 3, "correct": 2},
        {"id": "p2", "n": 3, "correct": 1},
    ]
    # Sample 2 of each problem is cut by the length limit; all have 5 tokens.
    assert result["cut"] == pytest.approx(1 / 3)
    assert result["parsed"] == 1.0
    assert result["tokens_per_answer"] == 5.0


def test_the_result_says_what_it_is_of(llm: MadeUp, tmp_path: Path) -> None:
    result = evaluate(llm, PROBLEMS, out=tmp_path, n=3, k=[1, 2, 3], dataset="sums")
    assert result["model"] == "made-up"
    assert result["dataset"] == "sums"
    assert result["scorer"] == "task:arithmetic"
    assert {"vllm", "torch"} <= result["versions"].keys()
    assert result["versions"]["model runner"] == "V2"
    assert result["machine"]["cores"]
    assert read_json(tmp_path / "evaluation.json") == result


def test_a_sample_s_line(llm: MadeUp, tmp_path: Path) -> None:
    evaluate(llm, PROBLEMS, out=tmp_path, n=3)
    first = samples(tmp_path)[0]
    assert len(first.pop("checksum")) == 16
    assert first == {
        "problem": "p1",
        "sample": 0,
        "prompt": "1 + 1?",
        "text": "It is 2.",
        "end": "<end>",
        "tokens": 5,
        "finish": "stop",
        "reward": 1.0,
        "correct": True,
        "extracted": "2",
        "parsed": True,
        "verdict": "right",
    }


def test_the_table_counts_problems_by_how_often_they_are_solved(llm: MadeUp, tmp_path: Path) -> None:
    # p1 is right in 2 of 3 samples, p2 in 1 of 3.
    three_samples = evaluate(llm, PROBLEMS, out=tmp_path / "three", n=3)
    assert "solved        0 always, 2 sometimes, 0 never" in evaluation.table(three_samples, "three")
    # Of one sample both are right, and p9 is wrong.
    wrong = replace(PROBLEMS[0], id="p9", answer="77")
    one_sample = evaluate(llm, [*PROBLEMS, wrong], out=tmp_path / "one", n=1)
    assert "solved        2 always, 0 sometimes, 1 never" in evaluation.table(one_sample, "one")


@pytest.mark.parametrize(("n", "ks"), [(1, (1,)), (15, (1, 4, 8)), (16, (1, 4, 8, 16))])
def test_the_default_ks_end_at_the_number_of_samples(n: int, ks: tuple[int, ...]) -> None:
    assert evaluation.checked_ks(None, n) == ks


def test_the_perturbed_rate_is_of_all_generated_tokens(llm: MadeUp, tmp_path: Path) -> None:
    """3 and 1 positions of responses with 5 tokens each: 4 of 10."""
    unperturbed = evaluate(llm, PROBLEMS, out=tmp_path, n=1)
    settings = read_json(tmp_path / "settings.json")
    perturbed_samples = [{**sample, "perturbed": count} for sample, count in zip(samples(tmp_path), (3, 1))]

    summary = evaluation.summarise(settings, PROBLEMS, perturbed_samples, (1,), 1.0, [])

    assert summary["perturbed_rate"] == pytest.approx(0.4)
    assert "perturbed_rate" not in unperturbed


def test_goes_on_where_it_was_interrupted(llm: MadeUp, tmp_path: Path) -> None:
    llm.stop_after = 4
    with pytest.raises(KeyboardInterrupt):
        evaluate(llm, PROBLEMS, out=tmp_path, n=3)
    before = lines(tmp_path)
    assert len(before) == 4
    assert not (tmp_path / "evaluation.json").exists()

    llm.generated = 0
    llm.stop_after = NEVER
    result = evaluate(llm, PROBLEMS, out=tmp_path, n=3)

    assert llm.generated == 2
    assert lines(tmp_path)[:4] == before
    assert result["mean_at_n"] == pytest.approx(1 / 2)


def test_samples_of_other_software_give_a_warning(llm: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was interrupted before its first sample counts for nothing."""
    for stop_after, release in ((0, "0.27"), (4, "0.28"), (NEVER, "0.29")):
        llm.generated = 0
        llm.stop_after = stop_after
        monkeypatch.setattr(versions, "installed_vllm", lambda release=release: release)
        with suppress(KeyboardInterrupt):
            result = evaluate(llm, PROBLEMS, out=tmp_path, n=3)

    assert "warning: the samples were drawn by runs that differ in vllm (0.28, 0.29)." in evaluation.table(result, "")
    monkeypatch.setattr(versions, "installed_vllm", lambda: "0.30")
    again = evaluate(llm, PROBLEMS, out=tmp_path, n=3)
    assert again["versions"]["vllm"] == "0.29", "of the last run that sampled"


def test_samples_of_one_software_give_no_warning(llm: MadeUp, tmp_path: Path) -> None:
    llm.stop_after = 4
    with pytest.raises(KeyboardInterrupt):
        evaluate(llm, PROBLEMS, out=tmp_path, n=3)
    llm.stop_after = NEVER
    assert "differ" not in evaluation.table(evaluate(llm, PROBLEMS, out=tmp_path, n=3), "")


RATES = """def reward_func(queries, prompts, labels):
    return {'rewards': [float(RATE)]}
"""
RATES_AND_SCORES = """def reward_func(queries, prompts, labels):
    return {'rewards': [float(RATE)], 'scores': [0.0]}
"""


@pytest.mark.parametrize(
    ("source", "rate", "warned"),
    [
        (RATES, "3", True),
        (RATES, "0.95", True),
        (RATES, "1", False),
        (RATES, "0", False),
        (RATES_AND_SCORES, "3", False),
    ],
)
def test_rewards_of_another_scale_give_a_warning(
    llm: MadeUp, tmp_path: Path, source: str, rate: str, warned: bool
) -> None:
    """A response counts as right from 1 on, which says little of a judge's 3 out of 10."""
    scorer = tmp_path / "judge.py"
    scorer.write_text(source.replace("RATE", rate))
    result = evaluate(llm, scored_by(scorer), out=tmp_path / "out", n=1)
    assert any(f"from {rate} to {rate}" in line for line in result["warnings"]) is warned


def test_another_helper_of_a_scorer_is_another_scorer(llm: MadeUp, tmp_path: Path) -> None:
    scorer = tmp_path / "reward_with_helper.py"
    scorer.write_text("from own_helper import value\n\n\n" + ALWAYS_RIGHT.replace("1.0", "value"))
    (tmp_path / "own_helper.py").write_text("value = 1.0\n")
    evaluate(llm, scored_by(scorer), out=tmp_path / "out", n=1)
    (tmp_path / "own_helper.py").write_text("value = 0.0\n")
    with pytest.raises(UsageError, match=r"other settings \(scorer_files was"):
        evaluate(llm, scored_by(scorer), out=tmp_path / "out", n=1)


def test_another_text_of_a_perturbation_is_another_perturbation(llm: MadeUp, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from perturbations.methods.gaussian import Gaussian\n\n\nclass Own(Gaussian):\n    paper = 'mine'\n"
    )
    spec = {"name": str(own), "rate": 0.5}
    evaluate(llm, PROBLEMS, out=tmp_path / "out", n=1, perturbation=spec)
    evaluate(llm, PROBLEMS, out=tmp_path / "out", n=1, perturbation=spec)
    own.write_text(own.read_text().replace("mine", "mine, changed"))
    with pytest.raises(UsageError, match=r"other settings \(perturbation was"):
        evaluate(llm, PROBLEMS, out=tmp_path / "out", n=1, perturbation=spec)


def test_another_k_of_a_finished_evaluation_needs_no_samples(llm: MadeUp, tmp_path: Path) -> None:
    evaluate(llm, PROBLEMS, out=tmp_path, n=3)
    assert llm.generated == 6
    evaluate(llm, PROBLEMS, out=tmp_path, n=3, k=[3])
    assert llm.generated == 6


def test_repeats_of_a_prompt_have_seeds_of_their_own(llm: MadeUp, tmp_path: Path) -> None:
    """A first occurrence keeps the seed of its prompt alone, and one of its repeats that goes on keeps its own."""
    repeated = [PROBLEMS[0], PROBLEMS[1], replace(PROBLEMS[0], id="p3"), replace(PROBLEMS[0], id="p4")]
    llm.stop_after = 2
    with pytest.raises(KeyboardInterrupt):
        evaluate(llm, repeated, out=tmp_path / "out", n=1)
    seeds = llm.seeds
    prompt_seeds = []
    for text in ("1 + 1?", "2 + 2?"):
        tokens = [ord(letter) for letter in text]
        prompt_seeds.append(trajectory_seed(0, json.dumps(tokens)))
    assert seeds[:2] == prompt_seeds
    assert len(set(seeds)) == 4

    llm.stop_after = NEVER
    evaluate(llm, repeated, out=tmp_path / "out", n=1)

    assert llm.seeds == seeds[2:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"n": 4}, r"other settings \(n was 3, and is now 4\)\. Give another --out", id="n"),
        pytest.param(
            {"sampling": Sampling(temperature=1)},
            r'sampling was .*"temperature": 0\.6.*, and is now .*: 1',
            id="sampling",
        ),
        pytest.param({"problems": [PROBLEMS[0], replace(PROBLEMS[1], answer="5")]}, "digest", id="problems"),
    ],
)
def test_other_settings_are_refused(llm: MadeUp, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    evaluate(llm, PROBLEMS, out=tmp_path, n=3)
    before = lines(tmp_path)
    with pytest.raises(UsageError, match=message):
        evaluate(llm, **{"problems": PROBLEMS, "out": tmp_path, "n": 3, **settings})
    assert lines(tmp_path) == before


def test_a_reward_file_reads_the_end_token_as_in_training(llm: MadeUp, tmp_path: Path) -> None:
    """A response that was cut, sample 2, has none. A rescored one has the same."""
    scorer = tmp_path / "scorer.py"
    scorer.write_text(ENDS_RIGHT)

    result = evaluate(llm, scored_by(scorer), out=tmp_path / "out", n=3)

    written = samples(tmp_path / "out")
    assert [sample["reward"] for sample in written] == [1.0, 1.0, 0.0] * 2
    assert [sample["end"] for sample in written] == ["<end>", "<end>", ""] * 2
    assert not any("<end>" in sample["text"] for sample in written)
    rescored = rescore(tmp_path / "out")
    assert rescored is not None
    assert rescored["problems"] == result["problems"]


def test_another_engine_is_another_evaluation(llm: MadeUp, tmp_path: Path) -> None:
    evaluate(llm, PROBLEMS, out=tmp_path / "out", n=1)
    with pytest.raises(UsageError, match=r"engine was \{\}, and is now .*float32"):
        evaluate(llm, PROBLEMS, out=tmp_path / "out", n=1, engine_options={"dtype": "float32"})


def test_another_scorer_s_source_is_another_evaluation_until_it_is_rescored(llm: MadeUp, tmp_path: Path) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text(ALWAYS_RIGHT)
    evaluate(llm, scored_by(scorer), out=tmp_path / "out", n=1)
    scorer.write_text(SAYS_99)
    reward_calls.load.cache_clear()  # a process reads a reward file once
    with pytest.raises(UsageError, match="scorer_files was"):
        evaluate(llm, scored_by(scorer), out=tmp_path / "out", n=1)
    rescore(tmp_path / "out")  # by the new source, which is the folder's from then on
    result = evaluate(llm, scored_by(scorer), out=tmp_path / "out", n=1)
    assert result["mean_at_n"] == 0.0


def test_rescore_reads_the_samples_and_generates_none(
    llm: MadeUp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(llm, PROBLEMS, out=tmp_path, n=3)
    texts = [sample["text"] for sample in samples(tmp_path)]
    reward = tmp_path / "reward.py"
    reward.write_text(SAYS_99)

    assert run(["--rescore", str(tmp_path), "--scorer", str(reward), "--k", "3"], report=print) == 0

    assert "Pass@3" in capsys.readouterr().out
    result = read_json(tmp_path / "evaluation.json")
    assert [problem["correct"] for problem in result["problems"]] == [1, 2]
    assert result["scorer"] == str(reward)
    assert result["versions"]["model runner"] == "V2", "the versions are of the run that sampled"
    assert [sample["text"] for sample in samples(tmp_path)] == texts
    assert llm.generated == 6


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ("choice", "is not a letter from A to Z, as scorer choice needs"),
        ("reasoning_gym", "was not made by reasoning-gym"),
        ("task:reasoning_gym:chain_sum", "was not made by reasoning-gym"),
    ],
)
def test_a_scorer_that_cannot_read_the_references_scores_nothing_anew(
    scorer: str, message: str, llm: MadeUp, tmp_path: Path
) -> None:
    evaluate(llm, PROBLEMS, out=tmp_path, n=3)
    before = samples(tmp_path)
    with pytest.raises(UsageError, match=message):
        rescore(tmp_path, scorer=scorer)
    assert samples(tmp_path) == before


def test_a_folder_that_was_scored_anew_is_one_of_the_new_scorer(llm: MadeUp, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(ALWAYS_RIGHT)
    evaluate(llm, PROBLEMS, out=tmp_path / "out", n=1)
    rescore(tmp_path / "out", scorer=str(reward))

    result = evaluate(llm, scored_by(reward), out=tmp_path / "out", n=1)

    assert llm.generated == 2
    assert result["mean_at_n"] == 1.0
    with pytest.raises(UsageError, match="was begun with other settings"):
        evaluate(llm, PROBLEMS, out=tmp_path / "out", n=1)


def test_a_response_may_fill_the_context(llm: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 6 tokens and a response of 14 are the 20 positions of the model."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 20}')
    monkeypatch.setattr(packaged, "load_tokenizer", lambda name, **options: llm.get_tokenizer())
    monkeypatch.setattr(engines, "build", lambda *args, **options: llm)

    fitting = Sampling(max_tokens=14)
    evaluate(str(model), PROBLEMS, out=tmp_path / "fits", n=1, sampling=fitting, hardware="cpu")

    too_long = Sampling(max_tokens=15)
    with pytest.raises(UsageError, match=r"may need 21 positions, and .* has 20\. Use at most --max-tokens 14\."):
        evaluate(str(model), PROBLEMS, out=tmp_path / "long", n=1, sampling=too_long, hardware="cpu")

    (model / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 6}')
    with pytest.raises(UsageError, match=r"has 6 tokens, .* Leave that problem out, or use another model\."):
        evaluate(str(model), PROBLEMS, out=tmp_path / "full", n=1, sampling=fitting, hardware="cpu")


def test_the_engine_is_told_the_step_and_the_number_of_responses(
    llm: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ladder of temperatures is over the responses to a problem, and other schedules follow the training step."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 5000}')
    monkeypatch.setattr(packaged, "load_tokenizer", lambda name, **options: llm.get_tokenizer())
    monkeypatch.setattr(engines, "build", lambda *args, **options: llm)
    policy = engines.RolloutPolicy.of(parse.run_config(["--sampling.schedule", "ladder"]), step=7)
    evaluate(str(model), PROBLEMS, out=tmp_path / "out", n=3, policy=policy, hardware="cpu")
    assert llm.settings == {"perturbed": False, "reproducible": True, "step": 7, "responses": 3}


def test_a_response_that_timed_out_in_scoring_is_not_called_unreadable() -> None:
    shares = evaluation.unscored({"parsed": 0.5, "timed_out": 0.25, "cut": 0.0})
    assert shares == {"cut": 0.0, "unreadable": 0.25, "timed_out": 0.25}
    assert evaluation.unscored({"parsed": 0.5})["unreadable"] == 0.5


def test_a_tenth_of_the_responses_is_no_warning() -> None:
    """A mean of tenths is rounded up in its last bit."""
    tenth = sum([0.1] * 3) / 3
    assert tenth > 0.1
    assert evaluation.unscored_warnings("x", {"cut": tenth, "unreadable": None}) == []
    assert evaluation.unscored_warnings("x", {"cut": 0.11}) == ["x: 11% of the responses were cut by the length limit"]


@pytest.mark.parametrize("words", ["--n 4", "--sampling.schedule ead", "--out elsewhere"])
def test_rescore_refuses_what_only_matters_for_generating(llm: MadeUp, tmp_path: Path, words: str) -> None:
    evaluate(llm, PROBLEMS, out=tmp_path, n=3)
    with pytest.raises(UsageError, match=f"{words} has no effect on --rescore"):
        run(["--rescore", str(tmp_path), *words.split()], report=print)


def test_an_evaluation_that_is_not_finished_is_not_rescored(llm: MadeUp, tmp_path: Path) -> None:
    llm.stop_after = 4
    with pytest.raises(KeyboardInterrupt):
        evaluate(llm, PROBLEMS, out=tmp_path, n=3)

    messages: list[str] = []
    assert rescore(tmp_path, report=messages.append) is None

    assert "4 of 6 samples" in messages[0]
    assert len(lines(tmp_path)) == 4


def test_samples_of_a_problem_that_is_gone_are_not_rescored(llm: MadeUp, tmp_path: Path) -> None:
    evaluate(llm, PROBLEMS, out=tmp_path, n=3)
    problems = tmp_path / "problems.jsonl"
    problems.write_text(problems.read_text().partition("\n")[0] + "\n")
    with pytest.raises(UsageError, match=r"problem 'p2', which problems\.jsonl lacks\. Restore its line"):
        rescore(tmp_path)


def test_rescore_of_a_folder_that_is_no_evaluation(llm: MadeUp, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no settings\.json there\. Give the --out folder"):
        rescore(tmp_path / "elsewhere")

    evaluate(llm, PROBLEMS, out=tmp_path / "diagnosis", n=3)
    (tmp_path / "diagnosis" / "problems.jsonl").unlink()  # a diagnosis has none
    with pytest.raises(UsageError, match=r"no problems\.jsonl there\. Give the --out folder of an evaluation"):
        rescore(tmp_path / "diagnosis")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"n": 0}, "--n 0: must be at least 1", id="n"),
        pytest.param({"k": [5]}, r"--k 5: Pass@k of 4 samples needs k in \[1, 4\]", id="k"),
        pytest.param({"problems": [PROBLEMS[0]] * 2}, "the same id", id="problems"),
    ],
)
def test_bad_settings(llm: MadeUp, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    settings = {"problems": PROBLEMS, "n": 4, "out": tmp_path / "out", **changes}
    with pytest.raises(UsageError, match=message):
        evaluate(llm, **settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("max_tokens", 0),
    ],
)
def test_bad_sampling(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"{name}={value}: must be "):
        Sampling(**{name: value})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data a.jsonl", "no model"),
        ("--model smollm2-135m", "by --data SRC or by --task NAME"),
        ("--model smollm2-135n --task arithmetic", "Did you mean 'smollm2-135m'"),
        ("--model smollm2-135m --task arithmetic --scorer math", "a task has its own"),
        ("--model smollm2-135m --task arithmetic --instruction Think.", "--instruction Think.: a task has its own"),
        ("--model smollm2-135m --task arithmetic --skip-unanswered", "--skip-unanswered True: a task has its own"),
        ("--model smollm2-135m --task arithmetic --n 4 --k 1,8", "--k 8"),
        ("--model smollm2-135m --task arithmetic --max-token 4", r"'--max-token'\. Did you mean '--max-tokens'"),
        ("--model smollm2-135m --task arithmetic --run-dir x", r"--run-dir belongs to ngrpo train\. Give --out"),
        ("--model smollm2-135m --task arithmetic --dry-run", "--dry-run belongs to ngrpo train"),
        ("--model smollm2-135m --task arithmetic --print verl", "--print belongs to ngrpo train"),
        ("--model smollm2-135m --task arithmetic --perturbation soft --perturbation.strict", "strict belongs to ngrpo"),
        ("--model smollm2-135m --task arithmetic --engine.max_num_seqs 8", r"Give --vllm\.max_num_seqs"),
        ("--rescore nowhere", r"no settings\.json there"),
        ("--model smollm2-135m --task arithmetic --vllm.dtype [", r"--vllm\.dtype '\['.*YAML"),
    ],
)
def test_bad_words(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(words.split(), report=print)


def test_an_answer_within_thinking_is_none_for_a_reward_file_too(tmp_path: Path) -> None:
    scorer = tmp_path / "reward.py"
    scorer.write_text(ALWAYS_RIGHT)
    problem = replace(PROBLEMS[0], scorer=str(scorer))
    assert score(problem, "The answer is 2.", prompt="1 + 1?").extracted == "2"
    assert score(problem, "The answer is 2.", prompt="1 + 1?<think>").extracted is None
