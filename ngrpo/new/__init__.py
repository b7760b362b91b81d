# SPDX-License-Identifier: Apache-2.0
"""`ngrpo new`: a file of one's own and its test, to start from."""
