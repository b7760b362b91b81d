# SPDX-License-Identifier: Apache-2.0
"""`ngrpo eval` on a real engine: kept samples, going on after a kill, the same seed."""

import json
from pathlib import Path
from typing import Any

import pytest

from ngrpo.commands.eval import run
from ngrpo.workbench.evaluate import Sampling, evaluate, evaluation, load_task
from perturbations.errors import UsageError
from tests.stack.harness import build_engine

N = 4


@pytest.fixture(scope="module")
def plain(model: str) -> Any:
    """What `ngrpo eval` builds where no perturbation is asked for."""
    return build_engine(model, None, additional_config={"seeded_draws": True})


def settings(**changes: Any) -> dict[str, Any]:
    # float32, so that a batch of another size does not round a token away.
    return {"n": N, "sampling": Sampling(temperature=1.0, top_p=0.95, max_tokens=12, seed=3), **changes}


def rows(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    lines = (folder / "samples.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    for row in found:
        row.pop("checksum")  # the tests change rows
    return {(row["problem"], row["sample"]): row for row in found}


def texts(folder: Path) -> dict[tuple[str, int], str]:
    return {key: row["text"] for key, row in rows(folder).items()}


def test_command(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command: engine, samples, result, table; then nothing left to do.

    Its output is taken as a notebook takes it: by a stream without a descriptor.
    """
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    words = f"--model {model} --task arithmetic --limit 6 --n {N} --k 1,2,4 --max-tokens 12 --temperature 1"
    command = [*words.split(), "--out", str(tmp_path), "--vllm.dtype", "float32"]
    lines: list[str] = []
    assert run(command, report=lines.append) == 0
    assert f"Mean@{N}" in capsys.readouterr().out and any("24 of 24 samples" in line for line in lines)
    kept = rows(tmp_path)
    assert set(kept) == {(f"arithmetic-{i}", j) for i in range(6) for j in range(N)}
    row = kept["arithmetic-0", 0]
    assert row["prompt"].startswith("<|im_start|>") and row["prompt"].endswith("assistant\n")
    assert row["finish"] in ("stop", "length") and 1 <= row["tokens"] <= 12 and "perturbed" not in row
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert result["perturbation"] is None and result["n"] == N and set(result["pass_at_k"]) == {"1", "2", "4"}
    counts = {p["id"]: p["correct"] for p in result["problems"]}
    assert counts == {f"arithmetic-{i}": sum(kept[f"arithmetic-{i}", j]["correct"] for j in range(N)) for i in range(6)}
    assert result["mean_at_n"] == pytest.approx(sum(counts.values()) / 24) == result["pass_at_k"]["1"]
    assert result["pass_at_k"]["4"] == pytest.approx(sum(c > 0 for c in counts.values()) / 6)

    lines.clear()
    assert run(command, report=lines.append) == 0
    assert not any("loading" in line for line in lines) and rows(tmp_path) == kept


@pytest.mark.parametrize("option", ["--vllm.no_such_option=1", "--vllm.dtype=float3"])
def test_options_that_vllm_refuses_are_the_users(model: str, tmp_path: Path, option: str) -> None:
    words = f"--model {model} --task arithmetic --limit 1 --n 1 --max-tokens 4 --out {tmp_path} {option}"
    with pytest.raises(UsageError, match=r"vLLM does not start with .*(no_such_option|float3)"):
        run(words.split(), report=lambda line: None)


def test_goes_on_where_it_stopped_with_the_same_samples(plain: Any, tmp_path: Path) -> None:
    problems = load_task("arithmetic", limit=8)
    whole = evaluate(plain, problems, out=tmp_path / "whole", **settings())
    first = texts(tmp_path / "whole")
    assert len(first) == 32 and len(set(first.values())) > 8  # the samples of a problem do differ

    cut = tmp_path / "cut"
    evaluate(plain, problems, out=cut, **settings())
    assert texts(cut) == first  # the same seed, another run
    kept = (cut / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (cut / "samples.jsonl").write_bytes(b"".join(kept[:13]) + kept[13][:40])  # killed while it wrote
    (cut / "evaluation.json").unlink()
    lines: list[str] = []
    resumed = evaluate(plain, problems, out=cut, report=lines.append, **settings())
    assert any("cut off half-way" in line for line in lines) and any("13 of 32 samples" in line for line in lines)
    assert (cut / "samples.jsonl").read_bytes().splitlines(keepends=True)[:13] == kept[:13]
    assert texts(cut) == first
    assert resumed["problems"] == whole["problems"] and resumed["pass_at_k"] == whole["pass_at_k"]

    # A problem's samples are its own: no other problem, number of samples or order changes them.
    evaluate(plain, problems[5:3:-1], out=tmp_path / "few", **settings(n=2))
    few = texts(tmp_path / "few")
    assert few == {key: first[key] for key in few} and len(few) == 4

    other = settings(sampling=Sampling(temperature=1.0, top_p=0.95, max_tokens=12, seed=4))
    evaluate(plain, problems, out=tmp_path / "other", **other)
    assert texts(tmp_path / "other") != first


def test_perturbed_only_when_asked(engine: Any, plain: Any, tmp_path: Path) -> None:
    problems = load_task("arithmetic", limit=2)
    evaluate(plain, problems, out=tmp_path / "plain", **settings())
    # An engine that has a perturbation leaves it off, and then draws as one without.
    off = evaluate(engine, problems, out=tmp_path / "off", **settings())
    assert texts(tmp_path / "off") == texts(tmp_path / "plain") and off["perturbation"] is None
    spec = {"name": "gaussian", "rate": 1.0, "sigma": 1.0}
    on = evaluate(engine, problems, out=tmp_path / "on", perturbation=spec, **settings())
    assert texts(tmp_path / "on") != texts(tmp_path / "off")
    assert all(row["perturbed"] > 0 for row in rows(tmp_path / "on").values() if row["tokens"] > 1)
    assert on["perturbed_rate"] > 0.5 and on["perturbation"] == spec


def test_an_interrupted_run_leaves_the_engine_idle(plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = load_task("arithmetic", limit=8)  # twice as many samples as run at once

    class Stop(Exception):
        pass

    def stop(line: str) -> None:
        raise Stop

    monkeypatch.setattr(evaluation, "_REPORT_SECONDS", 0.0)
    with pytest.raises(Stop):
        evaluate(plain, problems, out=tmp_path, report=stop, **settings())
    assert not plain.llm_engine.has_unfinished_requests()
    assert 1 <= len(rows(tmp_path)) < 32  # what had finished is kept
    assert len(evaluate(plain, problems, out=tmp_path, **settings())["problems"]) == 8
