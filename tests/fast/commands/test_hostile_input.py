# SPDX-License-Identifier: Apache-2.0
"""Random wrong command lines and option values: one message and code 2, never a traceback or a start."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ngrpo import cli
from ngrpo.machine.models import packaged
from ngrpo.machine.upstream import versions
from perturbations import UsageError, registry

MANY = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
FEW = settings(MANY, max_examples=150)

ODD = ["", " ", "-1", "0", "1e400", "nan", "-inf", "99999999999999999999", "none", "None", "true", "null", "1e-320"]
ODD += ["[]", "{}", "a,b", ",", ":", "./:", "x.py:", ".", "/", "~", "~nobody", "\u202e", "💥", "'", '"', "=", "\n"]
ODD += ["a=b", "%s", "{0}", "-", "٣", "1_000", "0x10", "a" * 5000, "$(x)", "../..", "*", "1,x"]
# No system passes a NUL on; files and callers do.
WRITTEN = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12)
TEXT = st.one_of(st.sampled_from(ODD), WRITTEN, st.integers().map(str), st.floats().map(str))
VALUES = st.one_of(TEXT, st.just("\0"), st.none(), st.booleans(), st.floats(), st.lists(st.integers(), max_size=2))
NAMES = st.sampled_from(["neighbor", "gaussian", "gumbel", "none", "soft", "hrpo", "nope", "./x.py:X", "a.b:C"])
OPTIONS = ["rate", "k", "until", "protect", "seed", "gate", "sigma", "config", "entropy_min", "variant", "refresh", "x"]
OURS = [*(f"--perturbation.{name}" for name in OPTIONS), "--model"]
OURS += ["--advantage", "--advantage.n", "--sampling.top_k", "--sampling.min_p", "--reproducible", "--preset", "--task"]
OURS += ["--hardware", "--run-dir", "--log-file", "--perturbation.replay_buffer", "--perturbation.gate.start"]
THEIRS = ["--rollout.temperature", "--train.batch_size", "--algo.advantage.estimator", "--ds.zero_stage", "--nope"]
THEIRS += ["--reward.remote_url", "--data.prompt_dataset", "--eval.dataset", "--actor.model_name_or_path", "-x"]
WORDS = st.lists(st.one_of(st.sampled_from([*OURS, *THEIRS]), TEXT, NAMES), min_size=1, max_size=8)


def pairs(*flags: str) -> st.SearchStrategy[list[str]]:
    """Some flags, each once, with a value each; right but for the values."""
    chosen = st.lists(st.tuples(st.sampled_from(flags), st.one_of(TEXT, NAMES)), max_size=3, unique_by=lambda p: p[0])
    return chosen.map(lambda found: [word for pair in found for word in pair])


# What no command line here can get past, so that one that happens to be right ends without starting anything.
IMPOSSIBLE = ["--train.max_epochs", "never"]
VALID = ["--perturbation", "neighbor"]
COMPARED = ["--perturbations", "--sweep", "--strategy", "--seeds", "--baseline", "--base", "--config", "--eval.n"]
COMPARED += ["--eval.k", "--eval.data", "--diagnose.prompts", "--diagnose.group", "--task", "--stock", "--out"]


@pytest.fixture(autouse=True)
def nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def started(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was started")

    def stopped(name: str, report: Any = None) -> str:
        raise UsageError("stopped before anything is loaded")

    monkeypatch.chdir(tmp_path)
    for end in ("trainers.openrlhf.launch.launch", "workbench.evaluate.engine.build", "workbench.compare.runs.command"):
        monkeypatch.setattr(f"ngrpo.{end}", started)
    monkeypatch.setattr(versions, "check_stack", lambda: None)
    # The last step before an engine: whatever is right until there ends there.
    monkeypatch.setattr(packaged, "resolve", stopped)
    monkeypatch.setattr(packaged, "check_on_hub", stopped)
    yield
    assert list(tmp_path.iterdir()) == []


def refused(words: list[str]) -> None:
    error = io.StringIO()
    output = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(output):
        code = cli.main(words)
    assert code == 2, (code, error.getvalue(), output.getvalue()[-300:])
    assert "Traceback" not in error.getvalue()
    assert "ngrpo: error: " in error.getvalue()
    assert "error of the program" not in error.getvalue()
    assert len(error.getvalue()) < 30_000


def has_help(words: list[str]) -> bool:
    return bool({"-h", "--help", "--openrlhf-help"} & set(words))


@MANY
@given(st.one_of(WORDS, pairs(*OURS, *THEIRS).map(lambda words: [*VALID, *words])))
def test_train(words: list[str]) -> None:
    if not has_help(words):
        refused(["train", *words, *IMPOSSIBLE])


@MANY
@given(st.one_of(pairs(*COMPARED, *THEIRS), WORDS))
def test_compare(words: list[str]) -> None:
    if not has_help(words):
        refused(["compare", "--strategy", "none", "--model", "smollm2-135m", *words, *IMPOSSIBLE])


@FEW
@given(NAMES, st.dictionaries(st.sampled_from(OPTIONS), VALUES, max_size=3))
def test_option_values(name: str, options: dict[str, Any]) -> None:
    """An option is refused in words, or it is one that its perturbation makes again from its spec."""
    try:
        made = registry.create(name, **options)
    except UsageError as error:
        assert len(str(error)) < 12_000
        return
    assert registry.create(**made.spec()) == made
