# SPDX-License-Identifier: Apache-2.0
"""The sandbox: a tiny model trained from scratch in minutes, and small problems on which methods can be told apart."""
