# SPDX-License-Identifier: Apache-2.0
"""The trainers that replay."""
