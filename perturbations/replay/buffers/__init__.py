# SPDX-License-Identifier: Apache-2.0
"""Replay buffers: the contract, and one file for each, named like it."""
