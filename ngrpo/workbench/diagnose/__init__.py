# SPDX-License-Identifier: Apache-2.0
"""`ngrpo diagnose`: before any training, how different and how valid a strategy's rollouts are."""
