"""What packaging, make and CI promise."""

from __future__ import annotations

import ast
import re
import stat
import subprocess
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def keyword(name: str) -> str:
    """The source of one argument of setup()."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    call = next(n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "setup")
    return ast.unparse(next(k.value for k in call.keywords if k.arg == name))


def test_entry_points_exist() -> None:
    points = ast.literal_eval(keyword("entry_points"))
    assert set(points) == {"console_scripts", "vllm.general_plugins"}
    for declared in (points["console_scripts"], points["vllm.general_plugins"]):
        module, _, _ = declared[0].partition(" = ")[2].partition(":")
        assert find_spec(module) is not None, f"{declared[0]}: no module {module}"
    assert callable(import_module("ngrpo.cli").console)


def test_core_needs_torch_numpy_and_yaml_only() -> None:
    assert ast.literal_eval(keyword("install_requires")) == ["torch", "numpy", "PyYAML"]


@pytest.mark.parametrize("extra", ["cpu", "cuda", "test"])
def test_extras(extra: str) -> None:
    assert f"'{extra}':" in keyword("extras_require")


@pytest.mark.parametrize("target", ["demo", "test", "test-fast", "test-stack", "lint", "clean", "bench"])
def test_make_targets(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_what_make_calls_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    scripts = re.findall(r"examples/\w+\.\w+", makefile)
    scripts += [module.replace(".", "/") + ".py" for module in re.findall(r"benchmarks\.\w+", makefile)]
    assert len(scripts) >= 3
    for script in scripts:
        assert (ROOT / script).is_file(), script


def test_ci_runs_make_test() -> None:
    run = ROOT / ".ci" / "run"
    assert run.stat().st_mode & stat.S_IXUSR and run.read_text().rstrip().endswith("make test")


def test_shell_scripts_parse() -> None:
    for script in [ROOT / ".ci" / "run", *(ROOT / "examples").glob("*.sh")]:
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_files_stay_small() -> None:
    for folder in ("perturbations", "ngrpo"):
        for file in (ROOT / folder).rglob("*.py"):
            assert len(file.read_text().splitlines()) <= 400, f"{file} is over 400 lines"
