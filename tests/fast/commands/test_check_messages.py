# SPDX-License-Identifier: Apache-2.0
"""`ngrpo check` of a file with a mistake: one message with its line, and no verdict on what could not be checked."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ngrpo import cli
from perturbations import registry

FILE = '''
from dataclasses import dataclass

import torch
from perturbations import InputEdit, Perturbation, Proposal, Step, register


@register("damp")
@dataclass(frozen=True, kw_only=True)
class Damp(Perturbation):
    """Mixes the sampled token with the likeliest one."""

    paper = "none"

    def propose(self, step: Step) -> Proposal:
        likeliest = step.logits.argmax(-1)
        ids = torch.stack([step.sampled, likeliest], dim=-1)
        weights = step.logits.new_full(ids.shape, 0.5)
        return Proposal(InputEdit(ids, weights), step.sampled)
'''
ORDINARY = "proposals for ordinary logits"
LATER = [
    "top-k of the request",
    "temperature 0.3",
    "temperature 1.5",
    "logits with -inf (masked tokens)",
    "very peaked logits",
    "uniform logits",
]

LAST = ["no wait for the device", "positions at which it acts"]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What the files register is forgotten after each test."""
    before = dict(registry.perturbations.registered)
    yield
    registry.perturbations.registered.clear()
    registry.perturbations.registered.update(before)


def checked(text: str, folder: Path, capfd: pytest.CaptureFixture[str], code: int = 1) -> list[str]:
    """The lines that `ngrpo check` prints for a file, torch's own log included."""
    (folder / "damp.py").write_text(text)
    assert cli.main(["check", str(folder / "damp.py")]) == code
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err and "fake_tensor" not in printed.err
    assert all(len(line) <= 100 for line in printed.out.splitlines())
    return printed.out.splitlines()


@pytest.mark.parametrize(
    ("right", "wrong", "what", "fix"),
    [
        (
            "[step.sampled, likeliest]",
            "[step.sampled, step.logits]",
            "propose(): line 17 of damp.py fails with RuntimeError: stack expects each tensor to be equal size, but got"
            " [7] at entry 0 and [7, 64] at entry 1 ids = torch.stack([step.sampled, step.logits], dim=-1)",
            "In this check step.logits is (7, 64), the smallest vocabulary that check_model accepts, and step.sampled"
            " (7,). Return ids (7, k) in int64,",
        ),
        (
            "step.logits.argmax",
            "stepp.logits.argmax",
            "line 16 of damp.py fails with NameError: name 'stepp' is not defined",
            "Correct that line.",
        ),
        (
            "return Proposal(InputEdit(ids, weights), step.sampled)",
            "return ids",
            "propose() (line 15 of damp.py) returns Tensor.",
            "Return Proposal(InputEdit(ids, weights), tokens)",
        ),
        (
            "(ids.shape, 0.5)",
            "(ids.shape, 0.5).double()",
            "edit.weights (line 15 of damp.py) is torch.float64.",
            "It must be torch.float32",
        ),
    ],
    ids=["shapes", "name", "type", "dtype"],
)
def test_one_message_and_what_depends_on_it_is_not_run(
    right: str, wrong: str, what: str, fix: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = checked(FILE.replace(right, wrong), tmp_path, capfd)
    assert [line.removeprefix("WRONG    ") for line in lines if line.startswith("WRONG")] == [ORDINARY]
    not_run = [line.removeprefix("not run  ") for line in lines if line.startswith("not run")]
    assert not_run == [*(f"proposals for {label}" for label in LATER), *LAST]
    said = " ".join(" ".join(lines).split())
    assert what in said and fix in said


def test_a_fault_of_some_logits_leaves_the_other_checks_running(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A masked token's weight is nan; ordinary logits are fine, so that all checks run."""
    text = FILE.replace("step.logits.new_full(ids.shape, 0.5)", "(0.0 * step.logits[:, :2]) + 0.5")
    lines = checked(text, tmp_path, capfd)
    assert [line for line in lines if line.startswith("WRONG")] == [f"WRONG    proposals for {LATER[3]}"]
    assert not any(line.startswith("not run") for line in lines)
    assert lines[-len(LAST) :] == [f"ok       {title}" for title in LAST]


@pytest.mark.parametrize(
    ("method", "title"),
    [
        (
            "def __post_init__(self):\n        super().__post_init__()\n        self.nothing\n",
            "an object is made of its",
        ),
        ("def check_model(self, size):\n        return sizes\n", "a small model that it fits"),
    ],
    ids=["constructor", "model"],
)
def test_another_method_that_fails_is_a_message_too(
    method: str, title: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = checked(FILE.replace("    def propose", f"    {method}\n    def propose"), tmp_path, capfd)
    (wrong,) = [line for line in lines if line.startswith("WRONG")]
    assert wrong.startswith(f"WRONG    {title}") and any("of damp.py fails with" in line for line in lines)


def test_a_right_file_has_no_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = checked(FILE, tmp_path, capfd, code=0)
    assert lines and all(line.startswith("ok ") for line in lines)


def test_a_misspelt_kind_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "replay_bufer", "memory"]) == 2
    assert (
        "'memory' must be option=value, for example rate=0.2. Did you mean 'replay_buffer'?" in capsys.readouterr().err
    )


@pytest.mark.parametrize(("kind", "hint"), [("scorer", ""), ("gates", " Did you mean 'gate'?")])
def test_a_word_before_a_file_that_is_no_kind_is_named(
    kind: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", kind, "./my_gate.py"]) == 2
    assert f"unknown kind '{kind}'.{hint} Kinds: perturbation, gate, replay_buffer," in capsys.readouterr().err


def test_a_file_of_another_kind_is_checked_with_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_credit.py").write_text("from ngrpo.methods.credits import Credit\n\n\nclass Mine(Credit):\n    pass\n")
    assert cli.main(["check", "./my_credit.py"]) == 2
    said = "It defines Mine (credit). Check it with: ngrpo check credit ./my_credit.py; or derive"
    assert said in capsys.readouterr().err
