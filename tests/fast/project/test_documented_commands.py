# SPDX-License-Identifier: Apache-2.0
"""Every command that README, docs and examples show is run here, or run dry, or listed with who runs it or why nobody.

Commands of training and comparing run with `--dry-run`: all that is checked before a start, with a small model in the
place of a large one. Where a command says "..." for what is left out, a model, a task and sizes are added.
"""

import ast
import contextlib
import dataclasses
import json
import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from ngrpo import cli
from ngrpo.config.kinds import FLAGS
from ngrpo.machine.upstream.openrlhf_flags import Flags, actions
from perturbations import registry
from tests.conftest import ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))
PAGES += sorted((ROOT / "examples").rglob("README.md"))
_FENCED = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHELL = ("bash", "sh", "shell", "console")
# A script's own comment and a Python file's docstring show how it is called.
_CALLED = re.compile(r"^#?\s*((?:bash examples/|ngrpo |python -m |\w+=\S+ (?:bash|ngrpo) ).*)$", re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """A command as it is shown.

    Attributes:
        page: the file, from the project's root.
        line: the command in one line, without its comment.
    """

    page: str
    line: str

    @property
    def words(self) -> list[str]:
        """As a shell splits them, without what says "and so on"."""
        return [word for word in shlex.split(self.line) if word not in ("...", "…")]

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """The fenced blocks of a page in these languages."""
    for match in _FENCED.finditer(page.read_text(encoding="utf-8")):
        if match["language"] in languages:
            yield re.sub(rf"^{match['indent']}", "", match["body"], flags=re.MULTILINE)


def commands() -> list[Command]:
    """All that stand in a fenced block for a shell, and in the heads of the files of examples/."""
    shown = [(page, block) for page in PAGES for block in blocks(page, *SHELL)]
    for file in sorted((ROOT / "examples").iterdir()):
        if file.suffix in (".sh", ".py"):
            text = file.read_text(encoding="utf-8").replace("\\\n", " ")
            head = ast.get_docstring(ast.parse(text)) or "" if file.suffix == ".py" else text.split("set -euo")[0]
            shown += [(file, line) for line in _CALLED.findall(head)]
    return [Command(str(page.relative_to(ROOT)), line) for page, text in shown for line in _lines(text)]


def _lines(text: str) -> Iterator[str]:
    values: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        bare = re.sub(r"\s+#\s.*$", "", line).strip()
        loop = re.fullmatch(r"for (\w+) in (\S+).*; do", bare)
        if loop:  # its body stands for all of them, with the first
            values[loop[1]] = loop[2]
        if loop or bare == "done":
            continue
        bare = re.sub(r"\$(\w+)", lambda match: values.get(match[1], match[0]), bare)
        if bare and not bare.startswith("#"):
            # [WORDS] of a usage line are what may be left out.
            yield re.sub(r"\s+", " ", re.sub(r"\s\[[^\]]*\.\.\.\]|\s\[[A-Z_]+\]", "", bare))


STACK = all(map(find_spec, ("openrlhf", "vllm", "ray")))
ELSEWHERE = yaml.safe_load((ROOT / "tests/data/commands_run_elsewhere.yaml").read_text(encoding="utf-8"))
OPTIONAL = ("trl",)  # packages that examples need and `make` does not set up
COMMANDS = list(dict.fromkeys(commands()))


def is_run_elsewhere(command: Command) -> bool:
    return any(re.fullmatch(pattern, command.line) for pattern, *_ in ELSEWHERE)


HERE = [command for command in COMMANDS if not is_run_elsewhere(command)]


def test_what_is_run_elsewhere_is_shown_somewhere_and_has_its_runner() -> None:
    for pattern, _, runner in ELSEWHERE:
        is_shown = any(re.fullmatch(pattern, command.line) for command in COMMANDS)
        assert is_shown, f"nothing shows {pattern}: take it out"
        assert (ROOT / runner).exists(), runner


def test_make_is_called_with_targets_that_are_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {command.words[1] for command in COMMANDS if command.words[0] == "make"}
    for page in PAGES:
        called.update(re.findall(r"`make ([\w-]+)", page.read_text(encoding="utf-8")))
    assert called <= targets
    assert len(called) > 8


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with what the commands name: the examples, and the files of a user, as the docs have them."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for page in PAGES:
        for block in blocks(page, "python"):
            named = re.match(r"# (\w+\.py)\n", block)
            if named:
                (tmp_path / named[1]).write_text(block)
    row = {"input": "1 + 1?", "label": "2"}
    (tmp_path / "data").mkdir()
    for name in ("prompts", "problems", "data/deepscaler", "data/aime2024"):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 128)
    (tmp_path / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': [0.0]}\n")
    monkeypatch.chdir(tmp_path)
    names_before = {kind: set(kind.registered) for kind in (registry.perturbations, registry.gates)}
    yield tmp_path
    # What the commands loaded from files is forgotten; what is loaded of the tree on the way stays.
    for kind, names in names_before.items():
        for name in set(kind.registered) - names:
            if not kind.registered[name].__module__.startswith("perturbations."):
                del kind.registered[name]


def stood_in(words: list[str]) -> list[str]:
    """With what is here in the place of a large model and of data on the hub."""
    flags = Flags(words)
    for name, ours in (("--model", "smollm2-135m"), ("--data", "problems.jsonl"), ("--eval.data", "problems.jsonl")):
        # The sandbox is small itself, and brings the flags with it on which its commands rest.
        if flags.value(name) not in (None, "sandbox") and not flags.has("--dry-run"):
            flags = flags.without(name).with_defaults({name: ours})
    return list(flags.argv)


def completed(command: Command, words: list[str]) -> list[str]:
    """With a model, a task and sizes where the command says that something is left out."""
    if "..." not in command.line and "…" not in command.line:
        return words
    given = Flags(words)
    sizes = {"--rollout.n_samples_per_prompt": "4", "--rollout.batch_size": "4", "--train.batch_size": "16"}
    task = {"--reward.remote_url": "reward.py"} if given.has("--data.prompt_dataset") else {"--task": "arithmetic"}
    estimator = {} if given.has("--advantage") else {"--algo.advantage.estimator": "group_norm"}
    return list(given.with_defaults({"--model": "smollm2-135m", **task, **estimator, **sizes}).argv)


def run(command: Command, words: list[str], folder: Path) -> int:
    """The exit code of a command of ours, as it is or dry."""
    name, *rest = words
    rest = stood_in(rest)
    if name in ("train", "compare"):
        rest = rest if "--help" in rest else completed(command, rest)
        return cli.main([name, *rest, *([] if {"--help", "--dry-run"} & set(rest) else ["--dry-run"])])
    if name in ("eval", "diagnose"):
        return import_module(f"ngrpo.commands.{name}").check(rest) or 0
    if name == "new":
        (folder / "new").mkdir(exist_ok=True)
        os.chdir(folder / "new")
    return cli.main([name, *rest])


@pytest.mark.skipif(not STACK, reason="needs OpenRLHF's parser")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("command", HERE, ids=str)
def test_the_command_is_accepted(command: Command, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = command.words
    environment = {}
    while re.fullmatch(r"\w+=\S*", words[0]):
        key, _, environment[key] = words.pop(0).partition("=")
    if words[0] == "bash":
        words = called_by(words[1:], environment, folder)
    assert words[0] == "ngrpo", f"{command}: neither run here nor listed in ELSEWHERE with who runs it"
    status = run(command, words[1:], folder)
    told = capsys.readouterr()
    assert status == 0, f"{command}\n{told.out}{told.err}"


def called_by(words: list[str], environment: dict[str, str], folder: Path) -> list[str]:
    """The command of ours that a script ends with."""
    stub = folder / "bin" / "ngrpo"
    stub.parent.mkdir()
    stub.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    path = f"{stub.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", *words], env={**os.environ, **environment, "PATH": path}, capture_output=True, text=True, check=True
    )
    return ["ngrpo", *json.loads(done.stdout)]


# pip's, vLLM's, and an option of the perturbation that the docs write as an example.
OF_OTHERS = {"--no-deps", "--ipc", "--additional-config", "--generation-config", "--perturbation.share"}


def known_flags(capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Of OpenRLHF, of everything registered, of each command's help, and of the benchmarks."""
    options = {
        f"{root}.{field.name}"
        for kept, root in FLAGS.items()
        for name in kept.in_tree()
        for field in dataclasses.fields(kept.get(name))
    }
    for command in re.findall(r"^  (\w+)  ", cli.__doc__ or "", re.MULTILINE):
        with contextlib.suppress(SystemExit):
            cli.main([command, "--help"])
    texts = [capsys.readouterr().out, *(path.read_text() for path in (ROOT / "benchmarks").rglob("*.py"))]
    of_openrlhf = {name for action in actions() for name in action.option_strings}
    return options | of_openrlhf | OF_OTHERS | set(re.findall(r"--[\w.-]*\w", "\n".join(texts)))


@pytest.mark.skipif(not STACK, reason="needs OpenRLHF's parser")
def test_flags_that_the_text_names_exist(capsys: pytest.CaptureFixture[str]) -> None:
    known = known_flags(capsys)
    unknown = []
    for page in PAGES:
        spans = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
        named = {flag for span in spans for flag in re.findall(r"(?<![\w-])--[\w.-]*\w", span)}
        unknown += [f"{page.name}: {flag}" for flag in named - known if not flag.startswith(("--vllm.", "--eval."))]
    assert not unknown


def test_python_blocks_parse_and_import_what_is_there() -> None:
    shown = [(page.name, block) for page in PAGES for block in blocks(page, "python")]
    nodes = [(page, node) for page, block in shown for node in ast.walk(ast.parse(block))]
    imports = [(page, node) for page, node in nodes if isinstance(node, ast.ImportFrom)]
    ours = [(page, node) for page, node in imports if str(node.module).startswith(("perturbations", "ngrpo"))]
    for page, node in ours:
        where = f"{page}: {ast.unparse(node)}"
        try:
            module = import_module(str(node.module))
        except ModuleNotFoundError as error:
            assert error.name in OPTIONAL, where
            continue
        for alias in node.names:
            assert hasattr(module, alias.name) or find_spec(f"{node.module}.{alias.name}"), where
    assert sum(len(node.names) for _, node in ours) > 20
