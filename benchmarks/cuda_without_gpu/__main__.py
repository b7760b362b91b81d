# SPDX-License-Identifier: Apache-2.0
"""What a decode step takes on a GPU without the model, by the code written for an H100; no GPU is needed.

    python -m benchmarks.cuda_without_gpu [--perturbations gumbel,soft] [--batch 1024] [--dtype float32]

Kernels are launches beyond those that draw the tokens. GB are read and written by all kernels, those of the draw too;
the operands of a kernel count once. The defaults are those of Qwen2.5-7B, with every position perturbed.
"""

import argparse
import warnings

import torch

from benchmarks.cuda_without_gpu.fake import decode_step
from perturbations import available, create


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--perturbations", default=",".join(sorted(available())), help="separated by commas")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=3584)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the logits")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(
        f"batch {options.batch}, vocabulary {options.vocabulary}, D {options.hidden}, {options.dtype} logits,"
        f" PyTorch {torch.__version__}"
    )
    print("| | kernels beyond the draw | GB |\n| --- | --- | --- |")
    for name in options.perturbations.split(","):
        perturbation = create(name) if name == "none" else create(name, rate=1.0)
        cost = decode_step(
            perturbation,
            batch=options.batch,
            vocabulary=options.vocabulary,
            hidden=options.hidden,
            dtype=getattr(torch, options.dtype),
        )
        print(f"| `{name}` | {cost.beyond_draw} | {cost.bytes / 1e9:.2f} |", flush=True)
    draw = cost.regions["draw"]
    print(f"| the draw alone | {draw.kernels} | {draw.bytes / 1e9:.2f} |")


if __name__ == "__main__":
    main()
