# SPDX-License-Identifier: Apache-2.0
"""``python -m ngrpo.config.compatibility > docs/compatibility.md``."""

from ngrpo.config.compatibility import page

print(page(), end="")
