# SPDX-License-Identifier: Apache-2.0
"""The OpenRLHF side: what is replaced in it, the run's settings in all processes, replay in the trained model."""
