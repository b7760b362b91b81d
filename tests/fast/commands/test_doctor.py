# SPDX-License-Identifier: Apache-2.0
"""`ngrpo doctor`: each thing that is wrong is found, with its fix; the self-test itself is in tests/stack."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ngrpo import cli, patches
from ngrpo.machine.upstream import versions

GOOD = {"runner": "V1", "edits": 16, "tokens": 32, "gap": 2e-5, "unreplayed": 3.0, "plain": 1e-5}


def findings(capsys: pytest.CaptureFixture, *words: str) -> tuple[int, str]:
    """The exit code, and what is printed before the block for a bug report."""
    code = cli.main(["doctor", *words])
    printed = capsys.readouterr().out
    head, _, block = printed.partition("\n--- for a bug report ---\n")
    assert max(map(len, head.splitlines())) <= 100
    head = re.sub(r"\n {7}(?!fix: )", " ", head)  # a finding that takes several lines
    assert block.endswith("---\n")
    assert all(line.startswith(("- ", "---")) for line in block.splitlines())
    for line in head.splitlines():
        if line.startswith(("ok ", "WRONG")):
            assert "- " + " ".join(line.split()) in " ".join(block.split()), "the block has every finding"
    return code, head


def program(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def lines_of(head: str, subject: str) -> str:
    """A finding with its fix."""
    start = head.index(f" {subject}: ")
    end = min((i for i in (head.find("\nok ", start), head.find("\nWRONG", start)) if i >= 0), default=len(head))
    return head[start:end]


def test_all_is_well_here(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    code, head = findings(capsys, "--no-self-test")
    assert code == 0
    assert "WRONG" not in head
    assert "fix:" not in head
    subjects = [
        "Python",
        "releases",
        "hardware",
        "compiler",
        "caches",
        "folder for temporary files",
        "working directory",
    ]
    subjects += ["placement", "flash-attn", "upstream patches", "vLLM's plugin"]
    assert [line[7:].split(":")[0] for line in head.splitlines()] == subjects
    assert versions.OPENRLHF in head


def other_release(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: "0.10.0" if name == "openrlhf" else installed(name))


def changed_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in patches.OPENRLHF if row.upstream.startswith("sha:") and "openrlhf" in row.module)
    changed = dataclasses.replace(row, upstream="sha:000000000000")
    monkeypatch.setattr(patches, "OPENRLHF", (changed, *(other for other in patches.OPENRLHF if other is not row)))


INSTALL = f"pip install --no-deps openrlhf=={versions.OPENRLHF}"
WRONG = {
    "releases": (other_release, ["fix: OpenRLHF 0.10.0 is installed", INSTALL]),
    "compiler": (lambda patch: patch.setenv("CXX", "no-such-compiler"), ["not ready", "'no-such-compiler'"]),
    "upstream patches": (changed_definition, ["1 of", "Install the checked release", "python -m ngrpo.patches"]),
    "vLLM's plugin": (lambda patch: patch.setenv("VLLM_PLUGINS", "other"), ["fix: add ngrpo_perturbation to VLLM_"]),
}


@pytest.mark.parametrize("subject", WRONG)
def test_each_error_has_its_fix(subject: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    arrange, messages = WRONG[subject]
    arrange(monkeypatch)
    code, head = findings(capsys, "--no-self-test")
    assert code == 1
    for message in messages:
        assert message in lines_of(head, subject)


@pytest.mark.more
@pytest.mark.parametrize("command", ["doctor --no-self-test", "train --dry-run --perturbation none", "model sandbox"])
def test_a_package_that_transformers_refuses(command: str, tmp_path: Path) -> None:
    """transformers asks for the releases in the metadata, of which the first on the path is found."""
    (tmp_path / "tokenizers-0.1.dist-info").mkdir()
    (tmp_path / "tokenizers-0.1.dist-info" / "METADATA").write_text("Name: tokenizers\nVersion: 0.1\n")
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "NGRPO_CACHE": str(tmp_path / "cache")}
    run = [sys.executable, "-m", "ngrpo.cli", *command.split()]
    result = subprocess.run(run, env={**os.environ, **path}, capture_output=True, text=True)
    output = " ".join((result.stdout + result.stderr).split())
    assert "found tokenizers==0.1. Run: pip install 'tokenizers>=" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("built", [None, "13.0"])
def test_a_gpu_that_torch_does_not_see(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, built: str | None
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU, and torch sees it")
    program(tmp_path / "nvidia-smi", "echo 580.65.06")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    code, head = findings(capsys, "--no-self-test")
    finding = lines_of(head, "hardware")
    assert code == 1
    assert "there is a GPU with driver 580.65.06" in finding
    assert ("a driver for CUDA 13.0" if built else "a torch that is built for CUDA") in finding


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (GOOD, None),
        ({**GOOD, "gap": 2e-4}, "at most 1.0e-04 is exact"),
        ({**GOOD, "gap": 2e-4, "plain": 1e-4}, None),  # as a GPU rounds
        ({**GOOD, "edits": 0}, "was not perturbed"),
        ({**GOOD, "unreplayed": 5e-5}, "was not perturbed"),
        (None, "ValueError: there is no such thing"),
    ],
)
def test_what_the_self_test_finds(
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    result: dict[str, Any] | None,
    message: str | None,
) -> None:
    """The process of the self-test, here a script that leaves this result or ends with an error."""
    writes = f"cat > \"$4\" <<'END'\n{json.dumps(result)}\nEND\n"
    body = writes if result else "echo 'ValueError: there is no such thing' >&2\nexit 3"
    monkeypatch.setattr(sys, "executable", program(tmp_path / "python", body))
    code, head = findings(capsys)
    assert code == int(message is not None)
    finding = lines_of(head, "self-test")
    assert message is None or message in finding
    assert ("ended with status 3" in finding) == (result is None)
    assert result is None or "perturbed inputs among 32 tokens" in finding


def test_a_model_that_is_not_there() -> None:
    assert cli.main(["doctor", "--model", "/no/such/model"]) == 2


def test_a_damaged_config_is_a_finding_among_others(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    code, head = findings(capsys, "--no-self-test", "--model", str(tmp_path))
    assert code == 1
    assert "cannot be read" in lines_of(head, f"model {tmp_path}")
    assert "vLLM's plugin" in head


def test_an_adapter_s_base_model_is_examined(
    capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = Path("base")
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    adapter = Path("adapter")
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    _, head = findings(capsys, "--no-self-test", "--model", str(adapter))
    assert "Qwen3ForCausalLM" in lines_of(head, f"model {base}, of the adapter {adapter}")
    (adapter / "adapter_config.json").write_text("{}")
    code, head = findings(capsys, "--no-self-test", "--model", str(adapter))
    assert code == 1
    assert "names no base_model_name_or_path" in lines_of(head, f"model {adapter}")
