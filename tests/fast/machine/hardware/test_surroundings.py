# SPDX-License-Identifier: Apache-2.0
"""Faults around a run that a start and doctor tell, in place of the packages that meet them minutes later."""

import os
from pathlib import Path

import pytest

from ngrpo import cli
from ngrpo.machine.hardware import surroundings
from ngrpo.machine.upstream import placement
from perturbations.errors import UsageError

CACHES = ("HF_DATASETS_CACHE", "VLLM_CACHE_ROOT", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR")
FOLDERS = ("HF_HOME", "TRITON_HOME", "XDG_CACHE_HOME")


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*CACHES, *FOLDERS, "RAY_TMPDIR", "RAY_ADDRESS", "VLLM_RPC_BASE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(placement, "started_here", lambda: None)


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "new"))
    surroundings.check_caches()
    assert not list(tmp_path.iterdir()), "nothing is made"
    home = tmp_path / "home"
    home.write_text("a file")
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(UsageError) as error:
        surroundings.check_caches()
    for word in (*CACHES, str(home), f"{home}/.triton/cache", f"{home}/.cache/torch_extensions"):
        assert word in str(error.value)
    for name in CACHES:
        monkeypatch.setenv(name, str(tmp_path / name))
    surroundings.check_caches()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(home))
    with pytest.raises(UsageError, match=rf"these caches cannot be written: vLLM's \({home}\)\."):
        surroundings.check_caches()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"TMPDIR": "/tmp"}, None),
        ({"TMPDIR": "/" + "t" * 74}, r"^TMPDIR=/t+: has 75 bytes, and the sockets that Ray makes there leave room for"),
        ({"TMPDIR": "/" + "ü" * 37}, r"^TMPDIR=/ü+: has 75 bytes"),
        ({"TMPDIR": "/tmp", "RAY_TMPDIR": "/" + "t" * 74}, "^RAY_TMPDIR=.* Set RAY_TMPDIR to a shorter path"),
        ({"TMPDIR": "/" + "t" * 74, "RAY_TMPDIR": "/tmp"}, "^TMPDIR=.* that vLLM makes there leave room for 70"),
        ({"TMPDIR": "/" + "t" * 74, "RAY_TMPDIR": "/tmp", "VLLM_RPC_BASE_PATH": "/tmp"}, None),
        ({"TMPDIR": "/" + "t" * 69, "RAY_ADDRESS": "10.0.0.1:6379"}, None),
    ],
)
def test_paths_of_sockets(variables: dict[str, str], said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if said is None:
        surroundings.check_sockets()
    else:
        with pytest.raises(UsageError, match=said):
            surroundings.check_sockets()


def test_ray_refuses_what_the_check_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest TMPDIR that is let through fits Ray's own check; one byte more does not."""
    from ray._private.utils import validate_socket_filepath

    session = f"session_2026-01-01_00-00-00_000000_{os.getpid()}"
    for length in range(20, 70):
        folder = "/" + "t" * (length - 1)
        monkeypatch.setenv("TMPDIR", folder)
        path = f"{folder}/ray/{session}/sockets/plasma_store"
        try:
            validate_socket_filepath(path)
        except OSError:
            with pytest.raises(UsageError):
                surroundings.check_sockets()
        else:
            surroundings.check_sockets()


@pytest.mark.parametrize(
    ("file", "refused"),
    [
        ("datasets/__init__.py", True),
        ("yaml.py", True),
        ("datasets/problems.jsonl", False),
        ("tests/__init__.py", False),
        ("my_rewards.py", False),
    ],
)
def test_a_package_of_the_working_directory(
    file: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    if refused:
        with pytest.raises(UsageError, match=rf"takes the place of the installed package .*{Path(file).parts[0][:4]}"):
            surroundings.check_shadowed()
    else:
        surroundings.check_shadowed()


@pytest.mark.more
def test_a_dry_run_and_doctor_tell_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").touch()
    for line in ("train --model smollm2-135m --task arithmetic --dry-run", "doctor --no-self-test"):
        assert cli.main(line.split()) == 1
        assert "takes the place of the installed package 'datasets'" in " ".join(capsys.readouterr().out.split())
