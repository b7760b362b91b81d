# SPDX-License-Identifier: Apache-2.0
"""What is read of OpenRLHF and vLLM: flags, parser, placement, releases."""
