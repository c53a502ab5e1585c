"""Decide which processes the system calls of a model's process may name.

The kernel suspends a call that names a process other than the caller, and asks the daemon. The
daemon allows the call where it names a process that the model started: such a process is in the
session that the model's process leads, and cannot leave that session. The calls have numbers as
arguments, so the arguments cannot change after the decision.
"""

from __future__ import annotations

import errno
import fcntl
import platform
import struct
from contextlib import suppress
from pathlib import Path

from edge_server.backends.python.child.system_calls import ARCHITECTURES, OF_A_PROCESS

# linux/seccomp.h: struct seccomp_notif (id, pid, flags, nr, arch, instruction pointer, arguments),
# struct seccomp_notif_resp (id, value, error, flags), and the ioctls that carry them.
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_RESPONSE = struct.Struct("=QqiI")
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1


def decide(listener: int, session: int) -> None:
    """Allow or refuse the system call that waits at `listener`.

    Args:
        listener: the seccomp listener.
        session: session of the processes that the call may name.
    """
    memory = bytearray(_NOTIFICATION.size)
    # The caller may have been killed meanwhile.
    with suppress(OSError):
        fcntl.ioctl(listener, _RECEIVE, memory)
        number, _, _, nr, _, _, *arguments = _NOTIFICATION.unpack(memory)
        named = arguments[_argument_of(nr)] & 0xFFFFFFFF
        if _session_of(named) == session:
            answer = _RESPONSE.pack(number, 0, 0, _CONTINUE)
        else:
            answer = _RESPONSE.pack(number, 0, -errno.EPERM, 0)
        fcntl.ioctl(listener, _SEND, bytearray(answer))


def _argument_of(nr: int) -> int:
    column = ARCHITECTURES[platform.machine()].column
    return next(place for numbers, place in OF_A_PROCESS.values() if numbers[column] == nr)


def _session_of(pid: int) -> int | None:
    """Return the session of that process or thread; None if no such process exists, or `pid` is
    negative (a process group)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name may hold any character; after it follow state, parent, group, session.
    return int(stat.rpartition(")")[2].split()[3])
