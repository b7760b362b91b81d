# SPDX-License-Identifier: Apache-2.0
"""Perturbations and gates of a user: from a file, from an installed package, from a module; in any process."""

import json
import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from perturbations import check_perturbation, create, registry
from tests.conftest import ROOT
from tests.fast.own_files import GATE, clean, message, write

__all__ = ["clean"]  # a fixture of every test here


# --- a file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decorator", "suffix"), [("", ":Mine"), ('@register("mine")', "")])
def test_a_file_with_and_without_decorator_and_name(decorator: str, suffix: str) -> None:
    write("folder/my-perturbation.py", decorator=decorator)
    perturbation = create(f"folder/my-perturbation.py{suffix}", strength="0.25", rate=0.5)
    assert (perturbation.strength, perturbation.rate) == (0.25, 0.5)
    spec = perturbation.spec()
    assert spec["name"] == "my-perturbation.py:Mine" and create(**spec) == perturbation
    assert perturbation.name == ("mine" if decorator else "my-perturbation.py:Mine")
    check_perturbation(f"./folder/my-perturbation.py{suffix}", strength="none")


def test_one_file_is_one_class_however_it_is_named(tmp_path: Path) -> None:
    write("mine.py", decorator='@register("mine")')
    cls = registry.get("./mine.py:Mine")
    for name in ("mine.py", str(tmp_path / "mine.py:Mine"), f"../{tmp_path.name}/mine.py:Mine", "mine"):
        assert registry.get(name) is cls
    assert registry.available()["mine"] == "mine.py"
    assert registry.get("mine.py:Mine", registry.perturbations.source(cls)) is cls


def test_an_edited_file_is_loaded_again() -> None:
    """As in a notebook: the name that it registers goes to the newer text."""
    write("mine.py", decorator='@register("mine")')
    old = create("mine.py")
    write("mine.py", decorator='@register("mine")', default="0.75")
    new = create("mine.py")
    assert (old.strength, new.strength) == (0.5, 0.75) and type(old) is not type(new)
    assert old.fingerprint() != create("mine.py", strength=0.5).fingerprint()  # another text is another perturbation
    write("other.py", decorator='@register("mine")')
    assert "'mine'" in message(lambda: create("other.py"))


def test_the_files_second_class_may_be_a_helper() -> None:
    second = '\n@register("mine")\n@dataclass(frozen=True, kw_only=True)\nclass Mine(Base):\n    pass\n'
    write("mine.py", name="Base", more=second)
    assert registry.get("mine.py").__name__ == "Mine"


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        (None, "mien.py:Mine", ["no file 'mien.py'", "Did you mean 'mine.py'?", "Python files in", "mine.py"]),
        (None, "nowhere/mine.py", ["no file", "no folder 'nowhere' either"]),
        (None, "a_folder.py", ["it is a folder"]),
        (None, "mine.py:Mien", ["has no perturbation 'Mien'", "Did you mean 'Mine'?", "It holds: Mine."]),
        (None, "mine", ["Did you mean the file './mine.py'?"]),
        ("", "x.py", ["x.py holds no perturbation", "defines no class", "Derive one from perturbations.Perturbation"]),
        ("class A:\n    pass\n", "x.py:A", ["holds no perturbation", "It defines A."]),
        ("import os\ndef f(:\n    pass\n", "x.py", ["line 2 of x.py is not Python", "def f(:", "fix that line"]),
        ("import torch\nx = torch.nope\n", "x.py", ["line 2 of x.py", "AttributeError", "    x = torch.nope"]),
        ("import no_such_thing\n", "x.py", ["line 1 of x.py", "no_such_thing", "installed", "every node"]),
        ("import sys\nsys.exit(3)\n", "x.py", ["line 2 of x.py", "SystemExit", '__name__ == "__main__"']),
        ("def f():\n    import mine\n", "x.py", ["line 2 of x.py imports 'mine'", "from its folder", "on every node"]),
        ("from . import mine\n", "x.py", ["line 1 of x.py imports '.'", "one file"]),
        ("x = '" + "".join(map(chr, range(256, 40000))) + "'\n", "x.py", ["too long", "49,152", "package"]),
        (b"x = '\xff'\n", "x.py", ["cannot be read as Python text", "UTF-8"]),
    ],
)
def test_bad_files(text: str | bytes | None, name: str, words: list[str]) -> None:
    write("mine.py")
    Path("a_folder.py").mkdir()
    if text is not None:
        Path("x.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    said = message(lambda: create(name))
    for word in words:
        assert word in said, said


def test_several_perturbations_in_a_file_are_listed() -> None:
    second = '\n@register("other")\n@dataclass(frozen=True, kw_only=True)\nclass Other(Mine):\n    pass\n'
    write("two.py", decorator='@register("mine")', more=second)
    said = message(lambda: create("./two.py"))
    assert "several perturbations" in said and "./two.py:Mine, ./two.py:Other" in said
    assert create("./two.py:Other").name == "other"


def test_what_a_failing_file_registered_is_forgotten() -> None:
    write("mine.py", decorator='@register("mine")', more="\n1 / 0\n")
    assert "ZeroDivisionError" in message(lambda: create("mine.py"))
    assert "mine" not in registry.available() and not any("file_mine" in name for name in sys.modules)
    write("mine.py", decorator='@register("mine")')
    assert create("mine.py").name == "mine"


def test_imports_of_installed_packages_are_no_siblings() -> None:
    """A file in a clone of this project lies beside the folder perturbations/, which it imports from the package."""
    for package in ("perturbations", "numpy", "json"):
        write(f"{package}/__init__.py")
    write("mine.py", more="\nimport json, numpy\n")
    create("mine.py")


# --- in another process -----------------------------------------------------------------------------------


def elsewhere(code: str, given: str, path: str = "") -> str:
    """Runs code in a fresh interpreter, in another folder, with this checkout's packages."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)]))}
    return subprocess.check_output([sys.executable, "-c", code], input=given, env=env, cwd="/", text=True)


REBUILD = """
import json, pickle, sys
from perturbations import check_perturbation, create
sent = json.load(sys.stdin)
made = [create(**spec) for spec in sent["specs"]]
made += [pickle.loads(bytes.fromhex(text)) for text in sent.get("pickles", [])]
for perturbation in made:
    check_perturbation(perturbation)
    print(perturbation.fingerprint())
"""


def test_a_process_without_the_files_makes_the_same_perturbation_and_gate() -> None:
    """From the spec as JSON, and from pickle; registered or not."""
    write("mine.py")
    write("named.py", name="Named", decorator='@register("named")')
    Path("gate.py").write_text(GATE)
    made = [create(f, strength=0.25, gate="gate.py", **{"gate.least": 7}) for f in ("mine.py", "named.py")]
    specs = [perturbation.spec() for perturbation in made]
    assert [spec["gate"] for spec in specs] == ["gate.py:Above"] * 2 and made[0].gate.least == 7
    for file in ("mine.py", "named.py", "gate.py"):
        Path(file).unlink()
    sent = json.dumps({"specs": specs, "pickles": [pickle.dumps(perturbation).hex() for perturbation in made]})
    assert elsewhere(REBUILD, sent).splitlines() == 2 * [perturbation.fingerprint() for perturbation in made]


def test_a_traceback_elsewhere_shows_the_users_line() -> None:
    """The lines of a file that is gone come from the text that the spec carries."""
    write("mine.py")
    spec = create("mine.py").spec()
    Path("mine.py").unlink()
    with pytest.raises(AttributeError) as error:
        create(**spec).propose(object())
    shown = "".join(traceback.format_exception(error.value))
    assert "mine.py" in shown and "return Proposal(one_hot(step.sampled), step.sampled)" in shown


SCRIPT = """
if __name__ == '__main__':
    import json
    from perturbations import check_perturbation, create
    check_perturbation(Mine)
    assert type(create('script.py:Mine')) is Mine
    print(json.dumps(Mine(strength=0.25).spec()))
"""


@pytest.mark.more
def test_a_script_is_its_own_file() -> None:
    """A perturbation in the script that is run: workers make it from the script's text, under another module name."""
    write("script.py", decorator='@register("mine")', more=SCRIPT)
    spec = json.loads(subprocess.check_output([sys.executable, "script.py"], text=True))
    assert spec["name"] == "script.py:Mine" and create(**spec).strength == 0.25


@pytest.mark.parametrize("damaged", ["?", "AAAA", "eJwD", 7])
def test_a_wrong_source_is_refused(damaged: object) -> None:
    assert "'source' is not the text of a file" in message(lambda: create("mine.py:Mine", source=damaged))
    write("mine.py")
    source = create("mine.py").spec()["source"]
    assert "'source' belongs to a name such as file.py:Name" in message(lambda: create("soft", source=source))


# --- an installed package ---------------------------------------------------------------------------------

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "their-dist"
version = "1.0"
[project.entry-points."ngrpo.perturbations"]
wobble = "their_package:Mine"
[project.entry-points."ngrpo.gates"]
above = "their_gates:Above"
[tool.setuptools]
py-modules = ["their_package", "their_gates"]
"""


@pytest.mark.more
def test_a_package_that_pip_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("project/their_package.py", decorator='@register("wobble")')
    Path("project/their_gates.py").write_text(GATE)
    Path("project/pyproject.toml").write_text(PROJECT)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "--target", "site", "./project"], check=True)
    site = str(tmp_path / "site")
    monkeypatch.syspath_prepend(site)
    perturbation = create("wobble", strength=0.25, gate="above", **{"gate.least": "5"})
    spec = perturbation.spec()
    assert (spec["name"], spec["gate"], spec["gate.least"]) == ("wobble", "above", 5) and "source" not in spec
    code = "from ngrpo.cli import main; main(['list'])\n" + REBUILD
    *listed, fingerprint = elsewhere(code, json.dumps({"specs": [spec]}), path=site).splitlines()
    assert fingerprint == perturbation.fingerprint()
    found = [line.split()[:4] for line in listed if line.startswith(("wobble", "above"))]
    assert found == [["wobble", "1", "package", "their-dist"], ["above", "package", "their-dist", "Open"]]
