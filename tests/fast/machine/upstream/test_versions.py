# SPDX-License-Identifier: Apache-2.0
"""What a result records of its machine: the visible GPUs by name, from a stand-in of nvidia-smi."""

import os
from pathlib import Path

import pytest

from ngrpo.machine.upstream import versions


@pytest.mark.parametrize(
    ("visible", "gpu"),
    [
        pytest.param(None, "2 × NVIDIA H200, NVIDIA L4", id="all"),
        pytest.param("0", "NVIDIA H200", id="one is visible"),
        pytest.param("", None, id="all are hidden"),
        pytest.param("-1", None, id="nvidia-smi refuses the number"),
    ],
)
def test_a_result_names_its_gpus(
    visible: str | None, gpu: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        '[ "$3" = --id=-1 ] && exit 6\n'
        'echo "NVIDIA H200"\n'
        '[ "$3" = --id=0 ] || printf "NVIDIA H200\\nNVIDIA L4\\n"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert versions.machine().get("gpu") == gpu


def test_evaluations_on_two_gpus_differ() -> None:
    machines = [{"cpu": "AMD EPYC"}, {"cpu": "AMD EPYC", "gpu": "H100"}, {"cpu": "AMD EPYC", "gpu": "H200"}]
    recorded = [{"versions": {"vllm": "0.29.0"}, "machine": machine} for machine in machines]
    assert versions.differing_conditions(recorded) == ["GPU (H100, H200)"]
    assert versions.differing_conditions(recorded[:2]) == [], "earlier releases recorded none"
