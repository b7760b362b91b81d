# SPDX-License-Identifier: Apache-2.0
"""The perturbations: a file each, named like it, or a file for a family (`perturbations.registry`)."""
