# SPDX-License-Identifier: Apache-2.0
"""Models by name, and what their config.json says."""
