# SPDX-License-Identifier: Apache-2.0
"""A user's perturbation from a file; tests/stack/test_custom.py has those of an installed package."""

import json
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from perturbations import check_gate, check_perturbation, create, registry
from perturbations.testing import PerturbationError
from tests.support.own_files import GATE, clean, message, write

__all__ = ["clean"]  # a fixture of every test here
LIST_AS_DEFAULT = """
from dataclasses import dataclass
from perturbations import Perturbation
@dataclass(frozen=True, kw_only=True)
class Mine(Perturbation):
    layers: list = [1, 2]
"""


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
        (None, "mine.py:Mien", ["has no perturbation 'Mien'", "Did you mean 'Mine'?", "It holds: Mine."]),
        (None, "mine", ["Did you mean the file './mine.py'?"]),
        ("", "x.py", ["x.py holds no perturbation", "defines no class", "Derive one from perturbations.Perturbation"]),
        ("import os\ndef f(:\n    pass\n", "x.py", ["line 2 of x.py is not Python", "def f(:", "fix that line"]),
        ("import torch\nx = torch.nope\n", "x.py", ["line 2 of x.py", "AttributeError", "    x = torch.nope"]),
        ("import no_such_thing\n", "x.py", ["line 1 of x.py", "no_such_thing", "installed", "every node"]),
        (LIST_AS_DEFAULT, "x.py", ["line 4 of x.py", "Write a list as a text, such as '1,2'"]),
        ("import sys\nsys.exit(3)\n", "x.py", ["line 2 of x.py", "SystemExit", '__name__ == "__main__"']),
        ("def f():\n    import mine\n", "x.py", ["line 2 of x.py imports 'mine'", "from its folder", "on every node"]),
        ("x = '" + "".join(map(chr, range(256, 40000))) + "'\n", "x.py", ["too long", "49,152", "package"]),
    ],
)
def test_bad_files(text: str | None, name: str, words: list[str]) -> None:
    write("mine.py")
    if text is not None:
        Path("x.py").write_text(text)
    said = message(lambda: create(name))
    for word in words:
        assert word in said, said


def test_several_perturbations_in_a_file_are_listed() -> None:
    second = '\n@register("other")\n@dataclass(frozen=True, kw_only=True)\nclass Other(Mine):\n    pass\n'
    write("two.py", decorator='@register("mine")', more=second)
    said = message(lambda: create("./two.py"))
    assert "several perturbations" in said and "./two.py:Mine, ./two.py:Other" in said
    assert create("./two.py:Other").name == "other"


def test_imports_of_installed_packages_are_no_siblings() -> None:
    """A file in a clone of this project lies beside the folder perturbations/, which it imports from the package."""
    for package in ("perturbations", "numpy", "json"):
        write(f"{package}/__init__.py")
    write("mine.py", more="\nimport json, numpy\n")
    create("mine.py")


def test_a_traceback_elsewhere_shows_the_users_line() -> None:
    """The lines of a file that is gone come from the text that the spec carries."""
    write("mine.py")
    spec = create("mine.py").spec()
    Path("mine.py").unlink()
    with pytest.raises(AttributeError) as error:
        create(**spec).propose(object())
    shown = "".join(traceback.format_exception(error.value))
    assert "mine.py" in shown and "return Proposal(one_hot(step.sampled), step.sampled)" in shown


PROPOSAL = "        return Proposal(one_hot(step.sampled), step.sampled)"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("if (step.logits > 1e9).any(): return None", r"propose\(\) \(line 19 of mine.py\) waits"),
        ("hidden = step.hidden.sum()", r"step\.hidden is None unless the class says reads_hidden = True"),
    ],
)
def test_a_check_names_the_line_and_the_missing_declaration(line: str, words: str) -> None:
    path = Path(write("mine.py"))
    path.write_text(path.read_text().replace(PROPOSAL, f"        {line}\n{PROPOSAL}"))
    with pytest.raises(PerturbationError, match=words):
        check_perturbation("./mine.py")


def test_a_check_names_the_missing_state() -> None:
    Path("mine.py").write_text(GATE.replace("else step.sampled", 'else step.state["spent"]'))
    with pytest.raises(PerturbationError, match=r"step\.state has the names of initial_state\(self\)"):
        check_gate("./mine.py")


def test_a_base_classs_option_of_another_type_is_refused_before_it_is_used() -> None:
    path = Path(write("mine.py"))
    path.write_text(path.read_text().replace("loud: bool = option(False,", "protect: int = option(3,"))
    assert "Redeclare 'protect' as str | None" in message(lambda: create("mine.py"))


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
