# SPDX-License-Identifier: Apache-2.0
"""`ngrpo eval` on a real engine: kept samples, going on after a kill, the same seed."""

import json
from pathlib import Path
from typing import Any

import pytest

from ngrpo.commands.eval import run
from ngrpo.workbench.evaluate import Sampling, evaluate, load_task, missing_samples
from perturbations import create
from perturbations.errors import UsageError
from tests.stack.harness import build_engine

N = 4


@pytest.fixture(scope="module")
def plain(model: str) -> Any:
    """The engine that `ngrpo eval` builds without a perturbation; float32, so that a batch's size changes no token."""
    return build_engine(model, None, additional_config={"seeded_draws": True})


def settings(n: int = N, seed: int = 3) -> dict[str, Any]:
    sampling = Sampling(temperature=1.0, top_p=0.95, max_tokens=12, seed=seed)
    return {"n": n, "sampling": sampling}


def rows(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The kept samples, by problem and number of the sample."""
    rows_by_sample = {}
    for line in (folder / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        row.pop("checksum")  # the tests change rows
        rows_by_sample[row["problem"], row["sample"]] = row
    return rows_by_sample


def texts(folder: Path) -> dict[tuple[str, int], str]:
    return {sample: row["text"] for sample, row in rows(folder).items()}


def test_command(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command: engine, samples, result, table; a second run has nothing left to do.

    Its output is taken as a notebook takes it: by a stream without a descriptor.
    """
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    command = [
        *("--model", model),
        *("--task", "arithmetic"),
        *("--limit", "6"),
        *("--n", str(N)),
        *("--k", "1,2,4"),
        *("--max-tokens", "12"),
        *("--temperature", "1"),
        *("--out", str(tmp_path)),
        *("--vllm.dtype", "float32"),
    ]
    lines: list[str] = []
    assert run(command, report=lines.append) == 0
    assert f"Mean@{N}" in capsys.readouterr().out
    assert any("24 of 24 samples" in line for line in lines)

    problems = [f"arithmetic-{number}" for number in range(6)]
    kept = rows(tmp_path)
    assert set(kept) == {(problem, sample) for problem in problems for sample in range(N)}
    first_row = kept["arithmetic-0", 0]
    assert first_row["prompt"].startswith("<|im_start|>")
    assert first_row["prompt"].endswith("assistant\n")
    assert first_row["finish"] in ("stop", "length")
    assert 1 <= first_row["tokens"] <= 12
    assert "perturbed" not in first_row

    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert result["perturbation"] is None
    assert result["n"] == N
    assert set(result["pass_at_k"]) == {"1", "2", "4"}
    claimed = json.loads((tmp_path / "settings.json").read_text())
    assert claimed["engine"] == {"dtype": "float32", "block_size": 32}
    correct = {problem: sum(kept[problem, sample]["correct"] for sample in range(N)) for problem in problems}
    assert {problem["id"]: problem["correct"] for problem in result["problems"]} == correct
    mean = sum(correct.values()) / 24
    solved = sum(count > 0 for count in correct.values())
    assert result["mean_at_n"] == pytest.approx(mean)
    assert result["pass_at_k"]["1"] == pytest.approx(mean)
    assert result["pass_at_k"]["4"] == pytest.approx(solved / 6)

    lines.clear()
    assert run(command, report=lines.append) == 0
    assert not any("loading" in line for line in lines)
    assert rows(tmp_path) == kept


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--vllm.tensor_paralel_size=1", r"no engine option 'tensor_paralel_size' .* mean 'tensor_parallel_size'\?"),
        ("--vllm.dtype=float3", "vLLM does not start with .*float3"),
    ],
)
def test_options_that_vllm_refuses_are_the_users(model: str, tmp_path: Path, option: str, said: str) -> None:
    words = f"--model {model} --task arithmetic --limit 1 --n 1 --max-tokens 4 --out {tmp_path} {option}"
    with pytest.raises(UsageError, match=said):
        run(words.split(), report=lambda line: None)


def test_goes_on_where_it_stopped_with_the_same_samples(plain: Any, tmp_path: Path) -> None:
    problems = load_task("arithmetic", limit=8)
    whole = evaluate(plain, problems, out=tmp_path / "whole", **settings())
    first = texts(tmp_path / "whole")
    assert len(first) == 32
    assert len(set(first.values())) > 8, "the samples of a problem do differ"

    cut = tmp_path / "cut"
    evaluate(plain, problems, out=cut, **settings())
    assert texts(cut) == first, "the same seed gives another run the same samples"

    # The run is killed while it writes its fourteenth sample.
    file = cut / "samples.jsonl"
    kept = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(kept[:13]) + kept[13][:40])
    (cut / "evaluation.json").unlink()
    lines: list[str] = []
    resumed = evaluate(plain, problems, out=cut, report=lines.append, **settings())
    assert any("cut off half-way" in line for line in lines)
    assert any("13 of 32 samples" in line for line in lines)
    assert file.read_bytes().splitlines(keepends=True)[:13] == kept[:13]
    assert texts(cut) == first
    assert resumed["problems"] == whole["problems"]
    assert resumed["pass_at_k"] == whole["pass_at_k"]

    # A problem's samples are its own: no other problem, number of samples or order changes them.
    evaluate(plain, problems[5:3:-1], out=tmp_path / "few", **settings(n=2))
    few = texts(tmp_path / "few")
    assert len(few) == 4
    for sample, text in few.items():
        assert text == first[sample], sample

    evaluate(plain, problems, out=tmp_path / "other", **settings(seed=4))
    assert texts(tmp_path / "other") != first


def test_perturbed_only_when_asked(engine: Any, plain: Any, tmp_path: Path) -> None:
    problems = load_task("arithmetic", limit=2)
    evaluate(plain, problems, out=tmp_path / "plain", **settings())

    # An engine that has a perturbation leaves it off, and then draws as one without.
    off = evaluate(engine, problems, out=tmp_path / "off", **settings())
    assert texts(tmp_path / "off") == texts(tmp_path / "plain")
    assert off["perturbation"] is None

    spec = {"name": "gaussian", "rate": 1.0, "sigma": 1.0}
    on = evaluate(engine, problems, out=tmp_path / "on", perturbation=spec, **settings())
    assert texts(tmp_path / "on") != texts(tmp_path / "off")
    assert on["perturbation"] == create(**spec).spec()
    assert on["perturbed_rate"] > 0.5
    for sample, row in rows(tmp_path / "on").items():
        assert row["perturbed"] > 0 or row["tokens"] <= 1, sample


def test_an_interrupted_run_leaves_the_engine_idle(plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = load_task("arithmetic", limit=8)  # twice as many samples as run at once

    class Stop(Exception):
        pass

    def stop(line: str) -> None:
        raise Stop

    monkeypatch.setattr(missing_samples, "_REPORT_SECONDS", 0.0)
    with pytest.raises(Stop):
        evaluate(plain, problems, out=tmp_path, report=stop, **settings())
    assert not plain.llm_engine.has_unfinished_requests()
    assert 1 <= len(rows(tmp_path)) < 32, "what had finished is kept"
    result = evaluate(plain, problems, out=tmp_path, **settings())
    assert len(result["problems"]) == 8
