# SPDX-License-Identifier: Apache-2.0
"""One float32 engine and one float32 Hugging Face model of a tiny random model, shared by the tests of the rollout."""

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.stack.harness import DISTURBED, build_engine, load_in_float32

# These files are run first, so that neither of two processes waits for the other's last file.
LONGEST = (
    "test_models",
    "test_v2",
    "test_piecewise",
    "test_gpu_script",
    "test_interpreted",
    "test_tensor_parallel",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONGEST)


@pytest.fixture(scope="module")
def model(random_model: str) -> str:
    """The folder of the model of the fixtures below.

    A file that is about another model, such as the pretrained one, overrides this fixture.
    """
    return random_model


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[Any]:
    yield build_engine(model, {"name": "neighbor", "rate": 0.1}, **DISTURBED)


@pytest.fixture(scope="module", autouse=True)
def _engines_of_a_module_are_freed() -> Iterator[None]:
    """Frees what vLLM and glibc keep of a module's engines.

    An engine holds about a GB in cycles of references, and glibc keeps memory that is freed. vLLM keeps the
    environment, which the next file may set otherwise, and groups of ranks: those of a dense model have no experts.
    """
    yield
    parallel_state = sys.modules.get("vllm.distributed.parallel_state")
    if parallel_state is not None:
        parallel_state.cleanup_dist_env_and_memory()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module")
def hf_model(model: str) -> Any:
    return load_in_float32(model)


_status = 0


def pytest_sessionfinish(exitstatus: int) -> None:
    global _status
    _status = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Ends the process right after pytest's last line.

    Engines that live in this process are torn down by the interpreter in an order that makes triton's bindings
    (vLLM 0.29) report hundreds of leaked types, which would bury the result.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status)
