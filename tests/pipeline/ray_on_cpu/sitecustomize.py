# SPDX-License-Identifier: Apache-2.0
"""vLLM's platform of CPUs says that Ray may place its workers, as that of CUDA does; for processes that have this
folder on PYTHONPATH. Ray's "GPUs" are declared numbers.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class Finder(MetaPathFinder):
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
