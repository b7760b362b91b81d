# SPDX-License-Identifier: Apache-2.0
"""Common parts of all trainers, without Ray and without any trainer's types."""
