# SPDX-License-Identifier: Apache-2.0
"""Problems with their references, and what a model's answer is worth."""
