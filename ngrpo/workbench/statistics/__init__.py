# SPDX-License-Identifier: Apache-2.0
"""Estimators, intervals and tests."""
