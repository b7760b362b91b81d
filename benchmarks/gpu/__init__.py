# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show, in stages that can be run one by one: ``python -m benchmarks.gpu --help``.

A stage is a module here with ``TITLE``, ``cases(rehearse)`` and ``measure(arguments)``, which yields one row of figures
after the other. Each case runs in a process of its own, so that one that ends in a CUDA error costs the others nothing.
"""
