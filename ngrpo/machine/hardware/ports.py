# SPDX-License-Identifier: Apache-2.0
"""The port at which a model's processes meet: one that no outgoing connection can take before it is listened at.

OpenRLHF 0.11.2 asks the system for a free port, gives it back, and listens there seconds later, once the model's
process has imported everything. The system's ports are those of outgoing connections too, of which a starting Ray and
vLLM open hundreds, so that now and then one of them has the port by then (TCPStore: EADDRINUSE).
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

# Above the ports that Ray gives its workers (10002 to 19999).
_LOWEST = 20000
_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 64


def outside_of_outgoing(original: Callable[[], int]) -> Any:
    """`BaseDistributedActor._get_free_port`: a free port below those of outgoing connections.

    Where the system gives those out from 20000 or below, or does not say from where, it is the original's.
    """

    @wraps(original)
    def free_port() -> int:
        # The system's randomness: two runs of one seed may start at the same time.
        draw = random.SystemRandom()
        end = _first_outgoing()
        for _ in range(_TRIES if end > _LOWEST else 0):
            port = draw.randrange(_LOWEST, end)
            with socket.socket() as probe:
                try:
                    probe.bind(("", port))
                except OSError:
                    continue
            return port
        return original()

    return staticmethod(free_port)


def _first_outgoing() -> int:
    """The lowest port of outgoing connections; 0 where the system does not say."""
    try:
        return int(_OUTGOING.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
