# SPDX-License-Identifier: Apache-2.0
"""How long `make demo` takes on this machine: ``python -m benchmarks.demo_time STEPS``.

A start is mostly imports, and a step is mostly matrix products. One of each is timed, and the factors are those of a
run on 2 cores of an AMD EPYC: a start of 18 imports, and 1,800 products a step.
"""

import sys
import time

_STARTS, _PRODUCTS = 18, 1800
_TIMED = 100


def main(steps: int) -> None:
    began = time.perf_counter()
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    imports, began = time.perf_counter() - began, time.perf_counter()
    for _ in range(_TIMED):
        torch.ones(1632, 576) @ torch.ones(576, 1536)  # the tokens of a step by the shape of an MLP
    product = (time.perf_counter() - began) / _TIMED
    minutes = (_STARTS * imports + steps * _PRODUCTS * product) / 60
    print(f"{steps} steps take about {max(round(minutes), 1)} minutes on this machine", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
