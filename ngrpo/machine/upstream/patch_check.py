# SPDX-License-Identifier: Apache-2.0
"""Patches compared with the installed sources, before anything starts."""

from collections.abc import Sequence
from importlib.metadata import packages_distributions

from ngrpo.machine.upstream.patch import Patch
from ngrpo.machine.upstream.versions import installed
from perturbations.errors import UsageError


class PatchMismatch(UsageError):
    """Upstream code is not what a row of the table was written against."""


def check(rows: Sequence[Patch]) -> None:
    """Compares rows with the installed sources, without importing them.

    Raises:
        PatchMismatch: one error that lists every row that does not match, expected and found.
    """
    mismatches = []
    for row in rows:
        state = row.state()
        if state != row.upstream:
            mismatches.append((row, state))
    if not mismatches:
        return
    lines = [f"{len(mismatches)} of {len(rows)} upstream patches do not match the installed packages:"]
    for row, state in mismatches:
        use = f"replaced by {row.ours}" if row.ours else "relied upon"
        lines += [
            f"  {row.target}",
            f"    expected {row.upstream} ({row.checked}), found {state} ({_release_of(row)})",
            f"    {use}: {row.why}",
        ]
    checked_releases = ", ".join(sorted({row.checked for row, _ in mismatches}))
    lines.append(
        f"Install the checked release ({checked_releases}), or read the new source, adapt ours and enter the new state"
        " in ngrpo/patches.py, as python -m ngrpo.patches prints it."
    )
    raise PatchMismatch("\n".join(lines))


def _release_of(row: Patch) -> str:
    """The installed package of a row with its release, ``openrlhf 0.11.2``."""
    top_module = row.module.partition(".")[0]
    package = packages_distributions().get(top_module, [top_module])[0]
    release = installed(package)
    return f"{package} {release}" if release else f"{top_module} is not installed"
