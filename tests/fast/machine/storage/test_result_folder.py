# SPDX-License-Identifier: Apache-2.0
"""The result folder under all commands: one holder, one set of settings, whole files, damaged lines, a full disk."""

import os
from pathlib import Path

import pytest

from ngrpo.machine.storage.result_folder import CannotWrite, ResultFolder, read_json, reserved_folder, write_json
from perturbations.errors import UsageError
from tests.support.file_limit import largest_file


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    with ResultFolder.opened(tmp_path) as folder, pytest.raises(UsageError, match="holds something else"):
        folder.claim({})
    (tmp_path / "settings.json").write_text("[]")
    with ResultFolder.opened(tmp_path) as folder, pytest.raises(UsageError, match="it has no valid settings"):
        folder.claim({})
    assert (tmp_path / "thesis.txt").read_text() == "all of it"


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, message in ((tmp_path / "file", "is a file"), (tmp_path / "file" / "out", "cannot be written")):
        with pytest.raises(UsageError, match=message), ResultFolder.opened(place):
            pass


def test_a_last_line_that_was_cut_is_dropped_with_a_message(tmp_path: Path) -> None:
    messages: list[str] = []
    folder = ResultFolder(tmp_path, messages.append)
    assert folder.lines("a.jsonl") == []
    folder.append("a.jsonl", [{"i": 0}, {"i": 1}])
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"i": 2, "te')
    assert folder.lines("a.jsonl", "i") == [{"i": 0}, {"i": 1}]
    assert len(messages) == 1
    assert "the last line was cut off half-way" in messages[0]
    folder.append("a.jsonl", [{"i": 2}])
    whole = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "a.jsonl").write_bytes(whole[:-1])  # an editor may leave the last line's end out
    assert [row["i"] for row in folder.lines("a.jsonl")] == [0, 1, 2]
    assert len(messages) == 1
    assert (tmp_path / "a.jsonl").read_bytes() == whole


@pytest.mark.parametrize("damaged", ['{"i": 1, "te', '{"j": 1}', ""])
def test_any_other_damaged_line_is_refused_and_kept(tmp_path: Path, damaged: str) -> None:
    text = f'{{"i": 0}}\n{damaged}\n{{"i": 2}}\n'
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(UsageError, match=r"a\.jsonl: line 2 is damaged\. Restore that line, or delete it"):
        ResultFolder(tmp_path).lines("a.jsonl", "i")
    assert (tmp_path / "a.jsonl").read_text() == text


def test_a_file_that_the_system_refuses_to_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to("/proc/self/mem")  # a regular file, of which nothing can be read from its start
    with pytest.raises(UsageError, match=r"a\.jsonl cannot be read: Input/output error\. Make it readable"):
        ResultFolder(tmp_path).lines("a.jsonl", mend=False)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"old": 1})
    with largest_file(50), pytest.raises(CannotWrite, match=r"a\.json cannot be written: File too large.*is kept"):
        write_json(tmp_path / "a.json", {"new": "x" * 100})
    assert read_json(tmp_path / "a.json") == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("flip", [1, 128])
def test_a_byte_that_was_altered_is_noticed(tmp_path: Path, flip: int) -> None:
    """Each one is refused, or, where only the layout or the mark's own name changed, harmless."""
    content = {"reward": 0.5, "name": "ab", "nested": {"x": [1, 2]}}
    folder = ResultFolder(tmp_path)
    folder.write("a.json", content)
    folder.append("a.jsonl", [content, {"second": 1}])
    for name, read in (("a.json", folder.read), ("a.jsonl", lambda name: folder.lines(name)[0])):
        whole = (tmp_path / name).read_bytes()
        first = whole.find(b"\n") if name == "a.jsonl" else len(whole)
        refused = 0
        for place in range(first):
            (tmp_path / name).write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
            try:
                found = read(name)
            except UsageError as error:
                assert "is damaged" in str(error)
                refused += 1
                continue
            assert {key: found[key] for key in content} == content
        assert refused > 0.7 * first


def test_what_an_editor_left_without_its_checksum_is_taken(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    held = (tmp_path / "a.json").read_text()
    (tmp_path / "a.json").write_text(held.replace('"x": 1', '"x": 2'))
    with pytest.raises(UsageError, match=r"checksum is not that of its content.*remove the entry 'checksum'"):
        read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"x": 2}')
    assert read_json(tmp_path / "a.json") == {"x": 2}


def test_a_new_folder_belongs_to_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "now")
    with reserved_folder(None, "none") as first, reserved_folder(None, "none") as second:
        assert first == Path("runs/now-none")
        assert second == Path("runs/now-none-2")
    assert second.is_dir()
    with pytest.raises(KeyError), reserved_folder(None, "none") as third:
        raise KeyError
    assert third == Path("runs/now-none-3")
    assert not third.exists()
    with pytest.raises(KeyError), reserved_folder(None, "none") as third:
        (third / "file").touch()
        raise KeyError
    assert third.is_dir()
    with pytest.raises(KeyError), reserved_folder("mine", "none") as reserved:
        refused = pytest.raises(UsageError, match=rf"another command \(process {os.getpid()}, .*give another folder")
        with refused, reserved_folder("mine", "none"):
            pytest.fail("two runs in one folder")
        raise KeyError
    assert reserved == Path("mine")
    assert not reserved.exists()
    with ResultFolder.opened(tmp_path / "out"), refused, ResultFolder.opened(tmp_path / "out"):
        pytest.fail("two commands in one folder")


def test_an_empty_folder_of_the_user_stays_where_a_start_fails(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(KeyError), reserved_folder(str(tmp_path / "mine"), "none"):
        raise KeyError
    assert (tmp_path / "mine").is_dir()
    with pytest.raises(KeyError), reserved_folder(str(tmp_path / "new"), "none"):
        raise KeyError
    assert not (tmp_path / "new").exists()
