# SPDX-License-Identifier: Apache-2.0
"""Every row of the table of patches against the installed packages, and the error when one does not match."""

import importlib
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from ngrpo import patches
from ngrpo.machine.upstream.patch import Patch, state_of
from ngrpo.machine.upstream.patch_check import PatchMismatch, check
from ngrpo.patches import OPENRLHF, VERL, VLLM

STACK = all(find_spec(name) for name in ("openrlhf", "vllm", "ray", "torch"))
needs_stack = pytest.mark.skipif(not STACK, reason="needs openrlhf, vllm, ray and torch installed")


@pytest.mark.parametrize("row", [*OPENRLHF, *VLLM, *VERL], ids=lambda row: row.target)
def test_a_row_is_complete_and_matches_the_installed_source(row: Patch) -> None:
    assert row.why
    assert len(row.checked.split()) >= 2
    module, _, name = (row.ours or "ngrpo").partition(":")
    assert find_spec(module) is not None
    if find_spec(row.module.partition(".")[0]) is None:
        pytest.skip("not installed")
    assert row.state() == row.upstream
    if STACK and name:
        assert callable(getattr(importlib.import_module(module), name))


@needs_stack
@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({"upstream": "sha:000000000000"}, "found sha:"),
        ({"upstream": "(self, weights)"}, "found (self, model"),
        ({"upstream": "class"}, "found (self, model"),
        ({"attribute": "DeepspeedStrategy.gone"}, "found nothing of that name"),
        ({"module": "openrlhf.trainer.ray.gone"}, "found no module openrlhf.trainer.ray.gone"),
    ],
)
def test_a_mismatch_is_one_clear_error(change: dict[str, str], state: str) -> None:
    row = next(row for row in OPENRLHF if row.attribute == "DeepspeedStrategy._get_model_parameters")
    broken = replace(row, **change)
    with pytest.raises(PatchMismatch) as error:
        check([row, broken])
    message = str(error.value)
    assert message.startswith("1 of 2 upstream patches")
    assert all(part in message for part in (broken.target, state, f"({row.checked})", "ngrpo/patches.py"))


@pytest.mark.parametrize(
    ("expected", "fits"),
    [
        ("(self, x, y, z)", True),
        ("(self, x, ...)", True),
        ("(self, ..., z)", True),
        ("(self, ...y, ...)", True),
        ("(self, x)", False),
        ("(self, y, ...)", False),
        ("(self, x, y, z, ...)", False),
        ("class", False),
    ],
)
def test_parameters_fit_where_all_that_are_named_are_there(expected: str, fits: bool, tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("class A:\n    def f(self, x, /, y, *args, z=1):\n        pass\n")
    state_found = state_of("part", "A.f", expected, tmp_path)
    assert (state_found == expected) is fits
    assert fits or state_found == "(self, x, y, z)"


MINE = """
import sys, types, contextlib
def one(original): return lambda self: original(self) + '1'
def two(original): return lambda self: original(self) + '2'
def three(original): return lambda self: original(self) + '3'
@contextlib.contextmanager
def stand_in():
    sys.modules['only_while_importing'] = types.ModuleType('only_while_importing')
    yield
    del sys.modules['only_while_importing']
"""


def test_patches_apply_on_import_compose_and_apply_once(tmp_path: Path) -> None:
    """In a process of its own, because patches change the import system."""
    package = tmp_path / "upstream_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "late.py").write_text("import only_while_importing\nclass A:\n    def f(self): return 'f'\n")
    (tmp_path / "mine.py").write_text(MINE)
    program = """
        import importlib.util, sys
        from ngrpo import patches
        from ngrpo.machine.upstream.patch import Patch
        row = lambda attribute, ours, when: Patch('upstream_pkg.late', attribute, ours, when, '', 'u 1', 'w')
        patches.OPENRLHF = (row('A.f', 'mine:one', 'x'), row('A.f', 'mine:two', 'y'), row('A.f', 'mine:three', 'z'))
        patches.OPENRLHF += (row('A.f', None, 'x'), row('<import>', 'mine:stand_in', 'x'))
        patches.install(['x'])
        patches.install(['x', 'y'])  # a plugin's, after a worker's set-up hook
        assert 'upstream_pkg' not in sys.modules
        importlib.util.find_spec('upstream_pkg.late')  # a look for the module does not lose its patches
        from upstream_pkg.late import A
        assert A().f() == 'f12', A().f()
        assert 'only_while_importing' not in sys.modules
        patches.install(['x', 'y', 'z'])
        assert A().f() == 'f123', A().f()
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, env=environment)


@needs_stack
def test_the_table_prints(capsys: pytest.CaptureFixture) -> None:
    assert patches.main() == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(OPENRLHF) + len(VLLM) + (len(VERL) if find_spec("verl") else 0)
