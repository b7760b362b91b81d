# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF: a subclass for each of its classes that a run changes, and the start of a run."""
