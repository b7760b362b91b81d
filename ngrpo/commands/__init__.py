# SPDX-License-Identifier: Apache-2.0
"""What each command does; one file each."""
