# SPDX-License-Identifier: Apache-2.0
"""The tables of comparisons on the sandbox's tasks, from results made by hand."""

import gzip
import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import trap_results
from ngrpo.workbench.compare import results

DOCS = Path(__file__).parents[2] / "docs"
DIAGNOSIS = {
    "group": 8, "prompts": 64, "warnings": ["away: a warning"],
    "strategies": [
        {
            "name": "away", "reward": 0.5, "pass_at_k": {"1": 0.5, "8": 0.75}, "learnable_groups": 0.4,
            "diversity": {"distinct_answers": 0.2, "score": 0.3}, "validity": {"perplexity": 2.5},
            "relative_shift": None,
        }
    ],
}  # fmt: skip


def comparison(counted: dict[str, float]) -> dict:
    """Two strategies, three seeds, six steps; a strategy tries the better way by a constant of its own."""
    correct = {"none": (60, 60, 61), "away": (90, 95, 70)}
    runs = [
        {
            "id": f"{name}-seed{seed}", "strategy": name, "seed": seed, "status": "done", "seconds": 60.0,
            "peak_memory_bytes": None,
            "steps": [{"step": n, "reward": 0.5, "task_counted": counted[name] * n} for n in range(1, 7)],
            "evaluation": {
                "problems": [{"id": "a", "n": 100, "correct": right}], "mean_at_n": right / 100, "pass_at_k": {},
            },
        }
        for name, ends in correct.items()
        for seed, right in enumerate(ends)
    ]  # fmt: skip
    return {
        "format": 1, "created": "then", "baseline": "none", "task": "shortcut",
        "machine": {"cores": 2, "cpu": "X"}, "runs": runs, "untrained": {"mean_at_n": 0.25}, "diagnosis": DIAGNOSIS,
        "strategies": [{"id": "none"}, {"id": "away"}],
        "summary": results.summarise(runs, ["none", "away"], "none", 0.8),
    }  # fmt: skip


def publish(monkeypatch: pytest.MonkeyPatch, study: Path, out: Path, *words: str) -> str:
    """The tables that the program writes."""
    monkeypatch.setattr(sys, "argv", ["trap_results", str(study), "--out", str(out), *words])
    trap_results.main()
    return (out / "tables.md").read_text()


def left(study: Path, found: dict, task: str = "shortcut") -> Path:
    """A study's folder with the results of a comparison."""
    (study / task).mkdir(parents=True, exist_ok=True)
    (study / task / "results.json").write_text(json.dumps(found))
    return study


def test_tables() -> None:
    found = comparison({"none": 0.01, "away": 0.1})
    none, away = trap_results.ends(found)
    assert none == ["`none`", "0.600 0.600 0.610", "0 of 3", "0.603", "–", "–"]
    # 0.30, 0.35 and 0.09 more; 2 of 3 against 0 of 3: of C(6, 2) = 15 tables 3 at each end, so p = 6 / 15.
    assert away[1:4] == ["0.900 0.950 0.700", "2 of 3", "0.850"] and away[4].startswith("+0.247 [")
    assert away[5] == "0.4 (0.4)"
    head, rows = trap_results.by_part(found, "task_")
    assert head == ["1 to 1", "2 to 2", "3 to 3", "4 to 4", "5 to 5", "6 to 6"]
    assert rows[1] == ["`away`", "0.100", "0.200", "0.300", "0.400", "0.500", "0.600"]
    text = trap_results.report({"shortcut": found})
    assert "Tried the better way" in text and "Deviation of the rewards" not in text, "no step has it"


def test_only_whole_comparisons_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study, out = tmp_path / "runs", tmp_path / "out"
    whole = comparison({"none": 0.0, "away": 0.0})
    left(study, {**whole, "runs": [*whole["runs"][1:], {"id": "x", "status": "pending"}]})
    with pytest.raises(SystemExit):
        publish(monkeypatch, study, out)
    assert "1 runs are not finished: x" in capsys.readouterr().err and not out.exists()
    text = publish(monkeypatch, left(study, whole), out)
    assert "away" in (out / "shortcut" / "report.html").read_text()
    assert "6 of 6 runs, 6 minutes" in text and "Before training: 0.250." in text
    assert "Rollouts of the untrained model, 64 groups of 8:" in text
    assert "| `away` | 0.500 | 0.750 | 0.400 | 0.200 | 0.300 | 2.500 | – |" in text


def leaves(value: object, path: str = "") -> dict[str, object]:
    """The numbers and words of a result, each under its path."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inner is None:
        return {path: value}
    return {place: leaf for key, each in inner for place, leaf in leaves(each, f"{path}/{key}").items()}


def test_published_results_are_computed_again() -> None:
    """From the runs that docs/ holds; docs/studies/study2.md has the ends of intervals that are others since."""
    changed = []
    for file in DOCS.glob("results/**/results.json.gz"):
        found = json.loads(gzip.decompress(file.read_bytes()))
        threshold = found["summary"][0].get("above", {}).get("threshold")
        names = [strategy["id"] for strategy in found["strategies"]]
        again = leaves(results.summarise(found["runs"], names, found["baseline"], threshold))
        before = leaves(found["summary"])
        changed += [(path, leaf, again[path]) for path, leaf in before.items() if again.get(path, ()) != leaf]
    ends = [path for path, _, _ in changed if path.endswith(("/low", "/high"))]
    words = [(was.partition(" [")[0], now.partition(" [")[0]) for path, was, now in changed if path.endswith("verdict")]
    over = [now for path, _, now in changed if path.endswith("/over")]
    none_detectable = [now for path, was, now in changed if path.endswith("detectable") and was == 0.0]
    assert len(ends) == 76 and all(was == now for was, now in words) and set(none_detectable) == {None}
    assert set(over) == {"problems"} and len(changed) == len(ends) + len(words) + len(none_detectable) + len(over)


def test_methods_md_says_what_was_measured() -> None:
    """The last column of the perturbations' table: of each that was run, the study's first arm, with its options."""
    published = DOCS / "results" / "study2" / "shortcut-late" / "results.json.gz"
    measured: dict[str, str] = {}
    for strategy, _, above, mean, *_ in trap_results.ends(json.loads(gzip.decompress(published.read_bytes()))):
        name, _, options = strategy.strip("`").partition(" ")
        measured.setdefault(name, f"{above}, {mean}" + (f" (`{options}`)" if options else ""))
    table = (DOCS / "methods.md").read_text(encoding="utf-8").partition("| method | what is fed |")[2]
    rows = [line.split(" | ") for line in table.partition("\n\n")[0].splitlines()[2:]]
    told = {tuple(re.findall(r"`(\w+)`", row[0])): row[-1].removesuffix(" |") for row in rows}
    assert told == {names: "; ".join(measured.get(name, "–") for name in names) for names in told}
    assert set(measured) <= {name for names in told for name in names}
