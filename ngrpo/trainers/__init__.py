# SPDX-License-Identifier: Apache-2.0
"""The trainers that replay: a room or a module for each."""
