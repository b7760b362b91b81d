# SPDX-License-Identifier: Apache-2.0
"""The conformance suites of perturbations and gates, for ours and for a third party's."""

from perturbations.testing.report import PerturbationError
from perturbations.testing.suite import check_gate, check_perturbation, inspect, outcomes

__all__ = ["PerturbationError", "check_gate", "check_perturbation", "inspect", "outcomes"]
