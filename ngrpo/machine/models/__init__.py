# SPDX-License-Identifier: Apache-2.0
"""Models by name, and what is known of a model's type."""
