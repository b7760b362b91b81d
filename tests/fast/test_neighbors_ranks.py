# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks share the search: each looks among its own rows, and both find what one rank finds."""

import pytest

from tests.own_process import run_two_ranks


@pytest.mark.more
def test_two_ranks_find_what_one_finds() -> None:
    for output in run_two_ranks("tests.fast.neighbor_ranks"):
        assert output.split() == ["torch.float32", "torch.bfloat16"]
