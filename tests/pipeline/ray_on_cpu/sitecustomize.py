# SPDX-License-Identifier: Apache-2.0
"""Lets Ray place the workers of vLLM's CPU platform, as it places those of CUDA's. Ray's "GPUs" are declared numbers.

Python runs this file at the start of each process that has its folder on PYTHONPATH.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class Finder(MetaPathFinder):
    """Changes the platform's class right after its module has been executed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "vllm.platforms.cpu":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            module.CpuPlatform.ray_device_key = "GPU"
            module.CpuPlatform.device_control_id_to_physical_device_id = classmethod(lambda cls, name: int(name))

        loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
