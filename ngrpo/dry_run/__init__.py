# SPDX-License-Identifier: Apache-2.0
"""`ngrpo train --dry-run`: what a run would be, from its flags and the model's configuration alone."""
