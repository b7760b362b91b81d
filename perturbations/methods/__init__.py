# SPDX-License-Identifier: Apache-2.0
"""One file per perturbation; the file's name is the perturbation's name."""
