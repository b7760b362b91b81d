"""The examples that need no engine; the others run in tests/pipeline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["custom_perturbation", "custom_gate"])
def test_custom_examples_check_themselves(name: str) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / f"{name}.py"
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "keeps the contract" in result.stdout
