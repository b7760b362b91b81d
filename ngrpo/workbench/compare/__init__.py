# SPDX-License-Identifier: Apache-2.0
"""`ngrpo compare`: several arms and seeds under one trainer, with intervals, costs and a report."""
