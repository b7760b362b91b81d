# SPDX-License-Identifier: Apache-2.0
"""The folder of an evaluation: resuming, refusals, a full disk; with a made-up engine instead of vLLM's."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ngrpo.commands.eval import run
from ngrpo.machine.models import packaged
from ngrpo.machine.storage.result_folder import read_json
from ngrpo.workbench.evaluate import Problem, Sampling, evaluate, evaluation, rescore
from ngrpo.workbench.evaluate import engine as engines
from ngrpo.workbench.evaluate.engine import Generated
from perturbations.errors import UsageError
from perturbations.seeds import trajectory_seed

PROBLEMS = [
    Problem(f"p{i}", ({"role": "user", "content": f"{i} + {i}?"},), str(2 * i), "task:arithmetic") for i in (1, 2)
]


class MadeUp:
    """Stands for a vllm.LLM: sample 0 of each problem is right, and so is sample 1 of the first."""

    def __init__(self) -> None:
        self.asked = 0
        self.stop_after = 10**9
        answers = {"perturbation_fingerprint": ["{}"], "perturbation_runner": ["V2"]}
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(model="made-up"), collective_rpc=lambda method, args=(): answers[method]
        )

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(
            chat_template=None,
            encode=lambda text, **_: [ord(letter) for letter in text],
            decode=lambda tokens, skip_special_tokens: "" if skip_special_tokens else "<end>" * len(tokens),
        )

    def generate(self, llm: Any, jobs: Any, sampling: Any, **_: Any) -> Iterator[list[Generated]]:
        self.seeds = [seed for _, seed, _ in jobs]
        for place, (tokens, _, sample) in enumerate(jobs):
            if self.asked >= self.stop_after:
                raise KeyboardInterrupt
            self.asked += 1
            i = int(chr(tokens[0]))
            text = f"It is {2 * i if sample < 3 - i else 99}."
            yield [Generated(place, text, [0] * 5, "length" if sample == 2 else "stop", None)]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    made_up = MadeUp()
    monkeypatch.setattr(engines, "generate", made_up.generate)
    monkeypatch.setattr(engines, "prepare", lambda llm, spec: True)
    return made_up


def lines(folder: Path) -> list[str]:
    return (folder / "samples.jsonl").read_text().splitlines()


def test_result_by_hand(llm: MadeUp, tmp_path: Path) -> None:
    """p1: 2 of 3 right, p2: 1 of 3. Pass@2: p1 1 - C(1,2)/C(3,2) = 1, p2 1 - C(2,2)/C(3,2) = 2/3."""
    result = evaluate(llm, PROBLEMS, out=tmp_path, n=3, k=[1, 2, 3], dataset="sums")
    assert result["mean_at_n"] == pytest.approx(1 / 2)
    assert result["pass_at_k"] == pytest.approx({"1": 1 / 2, "2": 5 / 6, "3": 1.0})
    assert result["problems"] == [{"id": "p1", "n": 3, "correct": 2}, {"id": "p2", "n": 3, "correct": 1}]
    assert (result["model"], result["dataset"], result["scorer"]) == ("made-up", "sums", "task:arithmetic")
    assert (result["cut"], result["parsed"], result["tokens_per_answer"]) == (pytest.approx(1 / 3), 1.0, 5.0)
    assert {"vllm", "torch"} <= result["versions"].keys() and result["machine"]["cores"]
    assert result["versions"]["model runner"] == "V2"
    assert read_json(tmp_path / "evaluation.json") == result
    first = json.loads(lines(tmp_path)[0])
    assert len(first.pop("checksum")) == 16
    verdict = {"reward": 1.0, "correct": True, "extracted": "2", "parsed": True, "verdict": "right"}
    answer = {"prompt": "1 + 1?", "text": "It is 2.", "end": "<end>", "tokens": 5, "finish": "stop"}
    assert first == {"problem": "p1", "sample": 0, **answer, **verdict}


def test_the_table_counts_problems_by_how_often_they_are_solved(llm: MadeUp, tmp_path: Path) -> None:
    """p1 is right in 2 of 3 samples, p2 in 1 of 3; of one sample p1 is right and p2 too, and of p9 none."""
    text = evaluation.table(evaluate(llm, PROBLEMS, out=tmp_path / "three", n=3), "three")
    assert "solved        0 always, 2 sometimes, 0 never" in text
    wrong = replace(PROBLEMS[0], id="p9", answer="77")
    text = evaluation.table(evaluate(llm, [*PROBLEMS, wrong], out=tmp_path / "one", n=1), "one")
    assert "solved        2 always, 0 sometimes, 1 never" in text


def test_the_default_ks_end_at_the_number_of_samples() -> None:
    assert [evaluation.checked_ks(None, n) for n in (1, 15, 16)] == [(1,), (1, 4, 8), (1, 4, 8, 16)]


def test_the_perturbed_rate_is_of_all_generated_tokens(llm: MadeUp, tmp_path: Path) -> None:
    """3 and 1 positions of responses with 5 tokens each: 4 of 10."""
    result = evaluate(llm, PROBLEMS, out=tmp_path, n=1)
    settings = read_json(tmp_path / "settings.json")
    samples = [{**json.loads(line), "perturbed": count} for line, count in zip(lines(tmp_path), (3, 1))]
    summary = evaluation.summarise(settings, PROBLEMS, samples, (1,), 1.0, None)
    assert summary["perturbed_rate"] == pytest.approx(0.4) and "perturbed_rate" not in result


def test_goes_on_where_it_was_interrupted(llm: MadeUp, tmp_path: Path) -> None:
    llm.stop_after = 4
    with pytest.raises(KeyboardInterrupt):
        evaluate(llm, PROBLEMS, out=tmp_path, n=3)
    assert len(lines(tmp_path)) == 4 and not (tmp_path / "evaluation.json").exists()
    kept, llm.asked, llm.stop_after = lines(tmp_path), 0, 10**9
    result = evaluate(llm, PROBLEMS, out=tmp_path, n=3)
    assert llm.asked == 2
    assert lines(tmp_path)[:4] == kept
    assert result["mean_at_n"] == pytest.approx(1 / 2)
    evaluate(llm, PROBLEMS, out=tmp_path, n=3, k=[3])  # another k needs no samples
    assert llm.asked == 2


def test_repeats_of_a_prompt_have_seeds_of_their_own(llm: MadeUp, tmp_path: Path) -> None:
    """A first occurrence keeps the seed of its prompt alone, and one of its repeats that goes on keeps its own."""
    twice = [PROBLEMS[0], PROBLEMS[1], replace(PROBLEMS[0], id="p3"), replace(PROBLEMS[0], id="p4")]
    llm.stop_after = 2
    with pytest.raises(KeyboardInterrupt):
        evaluate(llm, twice, out=tmp_path / "out", n=1)
    texts = ["1 + 1?", "2 + 2?"]
    first, other = (trajectory_seed(0, json.dumps([ord(letter) for letter in text])) for text in texts)
    whole = llm.seeds
    assert whole[:2] == [first, other] and len(set(whole)) == 4
    llm.stop_after = 10**9
    evaluate(llm, twice, out=tmp_path / "out", n=1)
    assert llm.seeds == whole[2:]


def test_other_settings_are_refused(llm: MadeUp, tmp_path: Path) -> None:
    evaluate(llm, PROBLEMS, out=tmp_path, n=3)
    before = lines(tmp_path)
    changed = [PROBLEMS[0], replace(PROBLEMS[1], answer="5")]
    for settings, says in (
        ({"n": 4}, r"other settings \(n was 3, and is now 4\)\. Give another --out"),
        ({"sampling": Sampling(temperature=1)}, r'sampling was .*"temperature": 0\.6.*, and is now .*: 1'),
        ({"problems": changed}, "digest"),
    ):
        with pytest.raises(UsageError, match=says):
            evaluate(llm, **{"problems": PROBLEMS, "out": tmp_path, "n": 3, **settings})
    assert lines(tmp_path) == before


def test_a_reward_file_reads_the_end_token_as_in_training(llm: MadeUp, tmp_path: Path) -> None:
    """A response that was cut, sample 2, has none. A rescored one has the same."""
    scorer = tmp_path / "scorer.py"
    scorer.write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    return {'rewards': [float(queries[0].removeprefix(prompts[0]).endswith('.<end>'))]}\n"
    )
    problems = [replace(problem, scorer=str(scorer)) for problem in PROBLEMS]
    result = evaluate(llm, problems, out=tmp_path / "out", n=3)
    samples = [json.loads(line) for line in lines(tmp_path / "out")]
    assert [sample["reward"] for sample in samples] == [1.0, 1.0, 0.0] * 2
    assert [sample["end"] for sample in samples] == ["<end>", "<end>", ""] * 2
    assert not any("<end>" in sample["text"] for sample in samples)
    again = rescore(tmp_path / "out")
    assert again is not None and again["problems"] == result["problems"]


def test_another_scorer_s_source_or_engine_is_another_evaluation(llm: MadeUp, tmp_path: Path) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': [1.0]}\n")
    problems = [replace(problem, scorer=str(scorer)) for problem in PROBLEMS]
    evaluate(llm, problems, out=tmp_path / "out", n=1)
    with pytest.raises(UsageError, match=r"engine was \{\}, and is now .*float32"):
        evaluate(llm, problems, out=tmp_path / "out", n=1, engine_options={"dtype": "float32"})
    scorer.write_text(scorer.read_text().replace("1.0", "0.0"))
    with pytest.raises(UsageError, match="scorer_files was"):
        evaluate(llm, problems, out=tmp_path / "out", n=1)
    rescore(tmp_path / "out")  # by the new source, which is the folder's from then on
    evaluate(llm, problems, out=tmp_path / "out", n=1)


def test_rescore(llm: MadeUp, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(llm, PROBLEMS, out=tmp_path, n=3)
    said = [json.loads(line)["text"] for line in lines(tmp_path)]
    reward = tmp_path / "reward.py"
    reward.write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': ['99' in queries[0]]}\n")
    assert run(["--rescore", str(tmp_path), "--scorer", str(reward), "--k", "3"], report=print) == 0
    assert "Pass@3" in capsys.readouterr().out
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert [p["correct"] for p in result["problems"]] == [1, 2] and result["scorer"] == str(reward)
    assert result["versions"]["model runner"] == "V2", "of the run that sampled"
    assert [json.loads(line)["text"] for line in lines(tmp_path)] == said
    assert llm.asked == 6


def test_a_folder_that_was_scored_anew_is_one_of_the_new_scorer(llm: MadeUp, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': [1.0]}\n")
    evaluate(llm, PROBLEMS, out=tmp_path / "out", n=1)
    rescore(tmp_path / "out", scorer=str(reward))
    result = evaluate(llm, [replace(problem, scorer=str(reward)) for problem in PROBLEMS], out=tmp_path / "out", n=1)
    assert llm.asked == 2 and result["mean_at_n"] == 1.0
    with pytest.raises(UsageError, match="was begun with other settings"):
        evaluate(llm, PROBLEMS, out=tmp_path / "out", n=1)


def test_a_response_may_fill_the_context(llm: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 6 tokens and a response of 14 are the 20 positions of the model."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 20}')
    monkeypatch.setattr(packaged, "load_tokenizer", lambda name: llm.get_tokenizer())
    monkeypatch.setattr(engines, "build", lambda *args, **options: llm)
    evaluate(str(model), PROBLEMS, out=tmp_path / "fits", n=1, sampling=Sampling(max_tokens=14), hardware="cpu")
    with pytest.raises(UsageError, match=r"that is 21 positions, and .* has 20\. Use at most --max-tokens 14\."):
        evaluate(str(model), PROBLEMS, out=tmp_path / "long", n=1, sampling=Sampling(max_tokens=15), hardware="cpu")


def test_a_response_that_timed_out_in_scoring_is_not_called_unreadable() -> None:
    shares = evaluation.unscored({"parsed": 0.5, "timed_out": 0.25, "cut": 0.0})
    assert shares == {"cut": 0.0, "unreadable": 0.25, "timed_out": 0.25}
    assert evaluation.unscored({"parsed": 0.5})["unreadable"] == 0.5


def test_a_tenth_of_the_responses_is_no_warning() -> None:
    tenth = sum([0.1] * 3) / 3
    assert tenth > 0.1 and evaluation.unscored_warnings("x", {"cut": tenth, "unreadable": None}) == []
    assert evaluation.unscored_warnings("x", {"cut": 0.11}) == ["x: 11% of the responses were cut by the length limit"]


@pytest.mark.parametrize("words", ["--n 4", "--sampling.schedule ead", "--out elsewhere"])
def test_rescore_refuses_what_only_matters_for_generating(llm: MadeUp, tmp_path: Path, words: str) -> None:
    evaluate(llm, PROBLEMS, out=tmp_path, n=3)
    with pytest.raises(UsageError, match=f"{words} has no effect on --rescore"):
        run(["--rescore", str(tmp_path), *words.split()], report=print)


def test_rescore_of_what_is_not_finished(llm: MadeUp, tmp_path: Path) -> None:
    llm.stop_after = 4
    with pytest.raises(KeyboardInterrupt):
        evaluate(llm, PROBLEMS, out=tmp_path, n=3)
    told: list[str] = []
    assert rescore(tmp_path, report=told.append) is None
    assert "4 of 6 samples" in told[0] and len(lines(tmp_path)) == 4
    with pytest.raises(UsageError, match=r"no settings\.json there\. Give the --out folder"):
        rescore(tmp_path / "elsewhere")
    (tmp_path / "problems.jsonl").unlink()  # as in the folder of a diagnosis
    with pytest.raises(UsageError, match=r"no problems\.jsonl there\. Give the --out folder of an evaluation"):
        rescore(tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n": 0}, "n=0: must be at least 1"),
        ({"k": [5]}, r"k=5: Pass@k of n=4 samples needs k in \[1, 4\]"),
        ({"problems": [PROBLEMS[0]] * 2}, "the same id"),
    ],
)
def test_bad_settings(llm: MadeUp, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        evaluate(llm, **{"problems": PROBLEMS, "n": 4, "out": tmp_path / "out", **changes})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "value"), [("temperature", -1.0), ("top_p", 0.0), ("top_p", 1.5), ("max_tokens", 0)])
def test_bad_sampling(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"{name}={value}: must be "):
        Sampling(**{name: value})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--data a.jsonl", "no model"),
        ("--model smollm2-135m", "by --data SRC or by --task NAME"),
        ("--model smollm2-135n --task arithmetic", "Did you mean 'smollm2-135m'"),
        ("--model smollm2-135m --task arithmetic --scorer math", "a task has its own"),
        ("--model smollm2-135m --task arithmetic --n 4 --k 1,8", "k=8"),
        ("--model smollm2-135m --task arithmetic --max-token 4", r"'--max-token'\. Did you mean '--max-tokens'"),
        ("--model smollm2-135m --task arithmetic --run-dir x", r"--run-dir belongs to ngrpo train\. Give --out"),
        ("--rescore nowhere", r"no settings\.json there"),
        ("--model smollm2-135m --task arithmetic --vllm.dtype [", r"--vllm\.dtype '\['.*YAML"),
    ],
)
def test_bad_words(words: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        run(words.split(), report=print)
