# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md explains what a step logs: every name that the trainers' sources log."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ngrpo.methods.scoring import reward_calls
from ngrpo.workbench.report import summary
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
SOURCES = [*(ROOT / "ngrpo" / "trainers").rglob("*.py"), *(ROOT / "ngrpo" / "methods" / "tasks").glob("*.py")]
LOGGED = r"(perturbation|importance|advantage|credit|policy_noise|sampling|score_centering|second_round|task)/(\w*)"


def names_in(path: Path) -> Iterator[str]:
    """Whole names, and the keys of a function that puts ``part/`` before each of its names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    prefixed = [node for node in functions if re.search(rf"f[\"\']{LOGGED}\{{name\}}", ast.unparse(node))]
    called = {node.id for function in prefixed for node in ast.walk(function) if isinstance(node, ast.Name)}
    # A function that a prefixing one calls makes keys for it, such as the quotients of a step's totals.
    makers = prefixed + [node for node in functions if node.name in called and node not in prefixed]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            whole = re.fullmatch(LOGGED, node.value)
            if whole and whole[2]:
                yield whole[2]
    for node in (inner for maker in makers for inner in ast.walk(maker)):
        keys: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            keys = list(node.keys)
        elif isinstance(node, ast.Subscript):
            keys = [node.slice]
        yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def test_each_metric_of_the_sources_is_explained() -> None:
    names = {name for path in SOURCES for name in names_in(path)}
    assert {"rate", "gap_unperturbed_mean", "cut", "uniform_groups", "in_loss", "scale", "solved", "counted"} <= names
    shown = {word for span in re.findall(r"`([^`\n]+)`", PAGE) for word in re.findall(r"\w+", span)}
    # Of `gap_perturbed_mean` and its like, which the page has whole; and what quotients are made from.
    parts = {"gap_", "perturbed", "plain", "before", "generated", "planned", "dropped"}
    parts |= {f"{quotient}_{total}" for quotient in ("shift", "left_anchor") for total in ("sum", "count")}
    elsewhere = {"gap_max"}  # TRL's, on the page of that trainer
    assert {"gap_perturbed_mean", "gap_plain_mean", "gap_before_mean", "shift", "left_anchor"} <= shown
    assert not names - parts - elsewhere - shown


def test_a_reward_s_own_metrics_have_other_names() -> None:
    """Names of the first table stand alone, those of the others after a prefix; ``task/`` is of tasks' own rewards."""
    first_table, _, rest = PAGE.partition("Runs with a perturbation")
    names = set(re.findall(r"^\| `(\w+)` \|", first_table, re.MULTILINE))
    assert "cut_turns" in names and names <= set(reward_calls._OF_NGRPO)
    prefixes = set(re.findall(r"`(?:train/)?(\w+/)(?:\w+)?`", rest)) - {"task/", "rollout/", "train/", "s/", "tokens/"}
    assert "staleness/" in prefixes and prefixes <= set(reward_calls._PREFIXES_OF_NGRPO)


def test_each_column_of_the_table_at_the_end_is_explained() -> None:
    table = PAGE.partition("## The table at the end of a run")[2]
    heads = {head for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for head in re.findall("`(.+?)`", row)}
    assert [heading for heading, *_ in summary._COLUMNS if heading not in heads] == []
    assert all(f"`{key}`" in PAGE for key in summary._AS_LOGGED)
