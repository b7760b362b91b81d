# SPDX-License-Identifier: Apache-2.0
"""The work of a GPU on a machine without one: kernels, bytes, waits, mixed devices, machine code.

Tensors say that they are on ``cuda:0``. They hold nothing (:mod:`.fake`, with the sizes of a real model) or values of a
CPU (:mod:`.pretended`). PyTorch's compiler writes the code for an H100 (:mod:`.inductor`). A stand-in captures and
replays graphs (:mod:`.recorded`). What only a GPU shows: speed, the capture of real CUDA graphs, pinned memory,
streams, and the numbers that the device computes.
"""
