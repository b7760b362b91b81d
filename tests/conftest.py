# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests."""

import os
from pathlib import Path

import pytest
import torch

from tests.claims import CLAIMS
from tests.support import shapes
from tests.support.tiny_folder import tiny_folder, tiny_language_model

ROOT = Path(__file__).resolve().parents[1]
shapes.check()
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    # Each would wait for the other's threads at every operation.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(workers)))


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The packaged SmolLM2-135M-Instruct as a Hugging Face folder; made on first use, then kept."""
    from ngrpo.machine.models import packaged

    return packaged.resolve("smollm2-135m")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> str:
    """A small random model that writes tokens of all kinds, and whose heads two ranks can divide: SmolLM2 has nine."""
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_folder(folder, smollm2, "llama", tie_word_embeddings=False, initializer_range=0.2)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> str:
    """Wherever the pretrained model is not the point: it has that one's tokenizer, and draws of a like entropy."""
    return tiny_language_model(tmp_path_factory.mktemp("random_model"), smollm2)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real problems beside the clone; absent on other machines."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real problems at {folder} (the folder ../shared/data from the project's root)")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything outside tests/fast is marked `stack`, and `more` unless its file shows a claim of `make test`.

    `gpu` tests are skipped without a device.
    """
    for item in items:
        path = Path(str(item.fspath)).relative_to(ROOT)
        if "fast" not in path.parts:
            item.add_marker("stack")
            if path.as_posix() not in CLAIMS:
                item.add_marker("more")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
