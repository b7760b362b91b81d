# SPDX-License-Identifier: Apache-2.0
"""What is shown on a terminal."""
