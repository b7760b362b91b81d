# SPDX-License-Identifier: Apache-2.0
"""Models that several files of whole runs share."""

from pathlib import Path

import pytest
import torch

from benchmarks.models import tiny
from tests.stack.tiny_models import tie_experts


@pytest.fixture(scope="session")
def tied_experts(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> Path:
    """A mixture whose experts are nearly tied, so that engine and trainer alone choose different ones."""
    folder = tmp_path_factory.mktemp("tied_experts")
    tiny.build("qwen3_moe", folder, Path(smollm2), torch.float32)
    tie_experts(folder)
    return folder
