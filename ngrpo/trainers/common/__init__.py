# SPDX-License-Identifier: Apache-2.0
"""What every trainer needs of a perturbed rollout, without Ray and without any trainer's types."""
