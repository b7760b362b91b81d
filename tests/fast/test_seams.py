# SPDX-License-Identifier: Apache-2.0
"""Every row of the seams table against the installed packages, and the error when one does not match."""

import importlib
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from importlib.util import find_spec

import pytest

from ngrpo.trainers.openrlhf import seams
from ngrpo.trainers.openrlhf.seams import SEAMS, Seam, SeamMismatch, active, check, state_of

STACK = all(find_spec(name) for name in ("openrlhf", "vllm", "ray", "torch"))
needs_stack = pytest.mark.skipif(not STACK, reason="needs openrlhf, vllm, ray and torch installed")


@needs_stack
@pytest.mark.parametrize("seam", SEAMS, ids=lambda s: s.target)
def test_row_matches_the_installed_source(seam: Seam) -> None:
    assert state_of(seam) == seam.upstream


@pytest.mark.parametrize("seam", SEAMS, ids=lambda s: s.target)
def test_row_is_complete(seam: Seam) -> None:
    assert seam.why and len(seam.checked.split()) == 2
    if seam.ours is not None:
        module, _ = seam.ours.split(":")
        assert find_spec(module) is not None


@needs_stack
@pytest.mark.parametrize("seam", [s for s in SEAMS if s.ours], ids=lambda s: s.target)
def test_ours_exists(seam: Seam) -> None:
    module, name = seam.ours.split(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_nothing_is_active_for_stock_openrlhf() -> None:
    assert active(()) == ()
    check(())


@needs_stack
@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({"upstream": "sha:000000000000"}, "found sha:"),
        ({"attribute": "BaseDistributedActor.gone"}, "found nothing of that name"),
        ({"module": "openrlhf.trainer.ray.gone"}, "found no module openrlhf.trainer.ray.gone"),
    ],
)
def test_a_mismatch_is_one_clear_error(change: dict[str, str], state: str) -> None:
    row = next(s for s in SEAMS if s.attribute == "BaseDistributedActor._get_free_port")
    broken = replace(row, **change)
    with pytest.raises(SeamMismatch) as error:
        check(("cpu",), [row, broken])
    message = str(error.value)
    assert message.startswith("1 of 2 seams")
    assert broken.target in message
    assert state in message
    assert row.checked.replace(" ", "==") in message
    assert "ngrpo/trainers/openrlhf/seams.py" in message


def test_a_package_that_is_not_installed_is_a_mismatch_too() -> None:
    row = Seam("no_such_package.x", "f", None, "cpu", "()", "no_such_package 1.0", "test")
    with pytest.raises(SeamMismatch, match=r"no module no_such_package\.x.*not installed"):
        check((), [row])


def test_rows_apply_on_import_and_compose(tmp_path, monkeypatch) -> None:
    """In a process of its own, because install() changes the import system."""
    (tmp_path / "upstream_pkg").mkdir()
    (tmp_path / "upstream_pkg" / "__init__.py").write_text("")
    (tmp_path / "upstream_pkg" / "late.py").write_text(
        "import only_while_importing\nclass A:\n    def f(self): return 'f'\n"
    )
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            import sys, types, contextlib
            def one(original): return lambda self: original(self) + '1'
            def two(original): return lambda self: original(self) + '2'
            @contextlib.contextmanager
            def stand_in():
                sys.modules['only_while_importing'] = types.ModuleType('only_while_importing')
                yield
                del sys.modules['only_while_importing']
            """
        )
    )
    program = """
        import sys
        from ngrpo.trainers.openrlhf import seams, install
        row = lambda attribute, ours: seams.Seam('upstream_pkg.late', attribute, ours, 'x', '', 'u 1', 'w')
        seams.SEAMS = (row('A.f', 'mine:one'), row('A.f', 'mine:two'), row('<import>', 'mine:stand_in'))
        install.install(['x'])
        assert 'upstream_pkg' not in sys.modules
        from upstream_pkg.late import A
        assert A().f() == 'f12', A().f()
        assert 'only_while_importing' not in sys.modules
    """
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, env=environment)


@needs_stack
def test_the_table_prints(capsys) -> None:
    assert seams.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == len(SEAMS)
