# SPDX-License-Identifier: Apache-2.0
"""What tests share: small models, steps by hand, stand-ins for upstream classes, pages read in a browser."""
