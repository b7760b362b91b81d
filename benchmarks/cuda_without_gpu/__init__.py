# SPDX-License-Identifier: Apache-2.0
"""What a GPU would be given to do, found on a machine without one: kernels, bytes, waits, mixed devices, machine code.

Tensors say that they are on ``cuda:0`` and hold nothing (:mod:`.fake`, sizes of a real model) or a CPU's values
(:mod:`.pretended`), and PyTorch's compiler writes the code for an H100 (:mod:`.inductor`). Not seen here: speed,
capture and replay of CUDA graphs, pinned memory, streams, and what numbers the device computes.
"""
