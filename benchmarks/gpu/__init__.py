# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show, in stages by their worth: ``python -m benchmarks.gpu --list``.

A module of stages has ``measure(arguments)``, which yields rows of figures, and ``judge(rows)``: (good, one line).
"""
