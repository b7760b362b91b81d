# SPDX-License-Identifier: Apache-2.0
"""How long `make demo` takes on this machine: ``python -m benchmarks.demo_time STEPS``.

A start is mostly imports, and a step is mostly matrix products. One of each is timed, and the factors are those of a
run on 2 cores of an AMD EPYC: a start of 18 imports, and 1,800 products a step.
"""

import sys
import time

_IMPORTS_OF_START = 18
_PRODUCTS_OF_STEP = 1800
_TIMED_PRODUCTS = 100


def main(steps: int) -> None:
    began = time.perf_counter()
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import_seconds = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(_TIMED_PRODUCTS):
        torch.ones(1632, 576) @ torch.ones(576, 1536)  # the tokens of a step by the shape of an MLP
    product_seconds = (time.perf_counter() - began) / _TIMED_PRODUCTS
    seconds = _IMPORTS_OF_START * import_seconds + steps * _PRODUCTS_OF_STEP * product_seconds
    minutes = max(round(seconds / 60), 1)
    print(f"{steps} steps take about {minutes} minutes on this machine", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
