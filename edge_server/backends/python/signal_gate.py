"""Decides for a model's process which processes its system calls may name.

The kernel stops a call that names another process than the caller, and asks here. It may go on
where it names one that the model started: those are in the session that the model's process leads,
and cannot leave it. The calls have numbers as arguments, so nothing changes after the decision.
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
# struct seccomp_notif_resp (id, value, error, flags), and the calls that carry them.
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_RESPONSE = struct.Struct("=QqiI")
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1


def decide(listener: int, session: int) -> None:
    """Let the call go on that waits at `listener`, or refuse it.

    Args:
        session: that of the processes that may be named.
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
    """Of that process or thread; None where there is none, or it is a group (a negative number)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # After the name, which may hold anything: state, parent, group, session.
    return int(stat.rpartition(")")[2].split()[3])
