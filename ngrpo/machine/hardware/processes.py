# SPDX-License-Identifier: Apache-2.0
"""Processes of a command: none outlives it, and each finds the programs of its Python environment."""

import os
import random
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from types import FrameType
from typing import Any

OWNER = "NGRPO_OWNER"
_GRACE_SECONDS = 5.0
# Above the ports of Ray's workers (10002 to 19999), below Linux' ports for outgoing connections.
_PORTS = range(20000, 32768)


SIGTERM_CAME = threading.Event()
"""Tells SIGTERM from Ctrl-C: an exception of ours would not do, for Ray raises its own KeyboardInterrupt instead."""


def raise_on_sigterm() -> None:
    """Makes SIGTERM raise ``KeyboardInterrupt`` in the main thread, unless another handler or SIG_IGN is installed."""

    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut short what the first one ends
        SIGTERM_CAME.set()
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def own_children() -> Iterator[None]:
    """Lets the processes that vLLM starts in the block end with this one; see :func:`end_with_owner`."""
    os.environ[OWNER] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[OWNER]


def end_with_owner() -> None:
    """In a process of vLLM: ends it when the process that called :func:`own_children` is gone, even by SIGKILL.

    Does nothing where nobody called that, and where the system has no process file descriptors (they are Linux's).
    """
    owner = os.environ.get(OWNER, "")
    if not owner.isdecimal() or int(owner) == os.getpid() or not hasattr(os, "pidfd_open"):
        return
    try:
        descriptor = os.pidfd_open(int(owner))
    except ProcessLookupError:
        os._exit(1)
    except OSError:
        return

    def wait() -> None:
        select.select([descriptor], [], [])  # readable when the process has ended
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-owner", daemon=True).start()


def end_children() -> None:
    """Ends the running processes that this one has started, politely first."""
    import psutil

    children = psutil.Process().children(recursive=True)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for child in children:
            try:
                child.send_signal(sign)
            except psutil.NoSuchProcess:
                continue
        _, children = psutil.wait_procs(children, timeout=_GRACE_SECONDS)


def add_programs_to_path() -> None:
    """Lets DeepSpeed compile with the ninja of this Python environment, activated or not."""
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])


def port_below_outgoing(original: Callable[[], int]) -> Any:
    """`BaseDistributedActor._get_free_port`: a free port that the system gives to no outgoing connection.

    OpenRLHF 0.11.2 listens at its port seconds after it chose it. Ray and vLLM open hundreds of connections meanwhile,
    from the system's own free ports (TCPStore: EADDRINUSE).
    """

    @wraps(original)
    def free_port() -> int:
        # The system's randomness: two runs of one seed may start at the same time.
        for port in random.SystemRandom().sample(_PORTS, 64):
            with socket.socket() as probe, suppress(OSError):
                probe.bind(("", port))
                return port
        return original()

    return staticmethod(free_port)
