# SPDX-License-Identifier: Apache-2.0
"""Processes of a command: none outlives it, and each finds the programs of its Python environment."""

import os
import random
import select
import signal
import socket
import stat
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


ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command as Ctrl-C does; a terminal that is closed sends SIGHUP."""
_received: list[int] = []


def ending_signal() -> int | None:
    """The one of :data:`ENDING_SIGNALS` that this process received; None for Ctrl-C.

    A subclass of KeyboardInterrupt could not carry the signal: Ray raises a KeyboardInterrupt of its own instead.
    """
    return _received[0] if _received else None


def raise_on_ending_signals() -> None:
    """Makes each of :data:`ENDING_SIGNALS` raise ``KeyboardInterrupt`` in the main thread.

    A signal with another handler keeps it, and one that is ignored stays so: nohup ignores SIGHUP.
    """

    def handler(number: int, frame: FrameType | None) -> None:
        for ending in ENDING_SIGNALS:  # a second signal must not interrupt the clean-up that the first one starts
            signal.signal(ending, signal.SIG_IGN)
        _received.append(number)
        if number == signal.SIGHUP:
            _leave_terminal()
        raise KeyboardInterrupt

    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """Lets output that would go to a closed terminal, where a write fails, go to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):  # isatty() is False once the terminal is closed
                os.dup2(null, descriptor)
    os.close(null)


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
    programs = os.path.dirname(sys.executable)
    os.environ["PATH"] = os.pathsep.join([programs, os.environ.get("PATH", "")])


def port_below_outgoing(original: Callable[[], int]) -> Any:
    """`BaseDistributedActor._get_free_port`: :func:`free_port`, or OpenRLHF's own where there is none.

    OpenRLHF 0.11.2 listens at its port seconds after it chose it. Ray and vLLM open hundreds of connections meanwhile,
    from the system's own free ports (TCPStore: EADDRINUSE).
    """

    @wraps(original)
    def chosen_port() -> int:
        port = free_port()
        return original() if port is None else port

    return staticmethod(chosen_port)


def free_port() -> int | None:
    """A free port that the system gives to no outgoing connection; None where 64 at random are all taken."""
    # The system's randomness: two runs of one seed may start at the same time.
    for port in random.SystemRandom().sample(_PORTS, 64):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    return None
