# SPDX-License-Identifier: Apache-2.0
"""Environments of the package verifiers, as far as they go without it: names, prompts, what is refused."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from ngrpo.workbench import environments, tasks
from ngrpo.workbench.environments import process
from ngrpo.workbench.report import summary
from ngrpo.workbench.tasks import verifiers
from perturbations.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("given", "module", "name"),
    [
        ("gsm8k", "gsm8k", ""),
        ("my-environment", "my_environment", ""),
        ("owner/my-environment@0.1.2", "my_environment", ""),
        ("package.part:with_tools", "package.part", "with_tools"),
    ],
)
def test_module_and_name(given: str, module: str, name: str) -> None:
    assert process.module_of(given) == (module, name)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the package is installed; it is looked for and not imported."""
    there = importlib.util.find_spec

    def found(name: str, *more: Any) -> Any:
        return there("json") if name == "verifiers" else there(name, *more)

    monkeypatch.setattr(process, "find_spec", found)


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ("verifiers", "needs an argument: --task verifiers:MODULE[:NAME], such as"),
        ("verifiers:no-such-module", "no installed module 'no_such_module'"),
        ("verifiers:no.such.module", "no installed module 'no.such.module'"),
        ("verifiers:a b", "no installed module 'a b'"),
        ("verifiers:json:a b", "'a b' is no name of Python"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_wrong_name_is_refused_before_anything_is_loaded(task: str, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        tasks.check_name(task)


@pytest.mark.usefixtures("installed")
def test_an_installed_module_passes() -> None:
    tasks.check_name("verifiers:json")
    tasks.check_name("verifiers:json.decoder:JSONDecoder")


def test_without_the_package_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "find_spec", lambda name, *more: None)
    with pytest.raises(UsageError, match=re.escape("not installed. Run: pip install 'verifiers>=0.2,<0.5'")):
        tasks.check_name("verifiers:json")


def test_prompts_are_chats_of_text() -> None:
    asked = environments.text_messages("2 + 2?")
    assert asked == [{"role": "user", "content": "2 + 2?"}]
    parts = [{"type": "text", "text": "2 "}, {"type": "text", "text": "+ 2?"}]
    assert environments.text_messages([{"role": "user", "content": parts, "tool_calls": None}]) == asked
    with_picture = [{"role": "user", "content": [*parts, {"type": "image_url", "image_url": {"url": "data:,"}}]}]
    for prompt in (with_picture, [{"role": "assistant", "content": "", "tool_calls": ["{}"]}], None, []):
        with pytest.raises(environments.Unfit):
            environments.text_messages(prompt)


def test_what_ends_a_turn_is_not_scored() -> None:
    told: list[str] = []

    class Told:
        def score(self, data: dict[str, Any], answer: str) -> environments.Scored:
            told.append(answer)
            return environments.Scored(0.5, {"right": 0.0, "brief": 1.0}, None)

    row = environments.Row([{"role": "user", "content": "?"}], {"answer": "4"})
    label = verifiers.label_of("module", row)
    prompt = "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "process_of", lambda environment: {"module": Told()}[environment])
        answers = ["a <|b|> 4<|im_end|>\n", "4</s>", "4"]
        found = verifiers.reward_func([prompt + answer for answer in answers], [prompt] * 3, [label] * 3)
    assert told == ["a <|b|> 4", "4", "4"]
    assert {name: value.tolist() for name, value in found["extra_logs"].items()} == {
        "rubric/brief": [1.0] * 3, "rubric/right": [0.0] * 3, "rubric/failed": [0.0] * 3,
    }  # fmt: skip
    assert found["rewards"].tolist() == [0.5] * 3


def test_the_range_that_is_named_is_the_extra() -> None:
    requirement = re.search(r'"(verifiers[^;"]+);', (ROOT / "setup.py").read_text())
    assert requirement is not None and f"pip install '{requirement[1]}'" == process.INSTALL


def test_the_rubric_is_in_the_summary_of_a_run() -> None:
    logged = {"train/rollout/reward_mean": {1: 0.5, 2: 1.0}, "train/rubric/right": {1: 0.25}, "train/other/x": {1: 1.0}}
    assert summary.steps(logged) == [{"step": 1, "reward": 0.5, "rubric_right": 0.25}, {"step": 2, "reward": 1.0}]
