"""Seccomp: restrict the system calls of this process and all its children.

A filter sees the numbers of a call but cannot judge them, e.g. whether the model started process
4711. The filter refers such calls to the daemon, see `decide`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import platform
import struct
from contextlib import suppress
from pathlib import Path

from edge_server.backends.python.child.system_calls import (
    ARCHITECTURES,
    CLONE,
    NONE,
    OF_A_PROCESS,
    OF_THE_USER,
    REFUSED,
    REFUSED_OF_CLONE,
    REFUSED_VALUES,
    SOCKET,
    UNKNOWN,
    WITHOUT_EFFECT,
    system_call,
)

# linux/seccomp.h
_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER, _GET_ACTION_AVAIL = 1, 2
_NEW_LISTENER = 8
_ALLOW, _ERRNO, USER_NOTIF = 0x7FFF0000, 0x00050000, 0x7FC00000
# linux/bpf_common.h: load a word, compare, mask, return.
_LD, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
# struct seccomp_data: nr, arch, instruction pointer, six arguments; the low half comes first.
_NR_AT, _ARCH_AT, _ARGUMENTS_AT, _ARGUMENT_BYTES = 0, 4, 16, 8
_X32 = 0x40000000
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = 1, 1, 0xF

# linux/seccomp.h: struct seccomp_notif (id, pid, flags, nr, arch, instruction pointer, arguments),
# struct seccomp_notif_resp (id, value, error, flags), and the ioctls that carry them.
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_RESPONSE = struct.Struct("=QqiI")
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1

Instruction = tuple[int, int, int, int]


def is_offered() -> bool:
    """Return whether this kernel has filters that refer calls to another process (Linux 5.5)."""
    if platform.machine() not in ARCHITECTURES:
        return False
    release = tuple(int(n) for n in platform.release().split("-")[0].split(".")[:2] if n.isdigit())
    try:
        _seccomp(_GET_ACTION_AVAIL, 0, ctypes.byref(ctypes.c_uint32(USER_NOTIF)))
    except OSError:
        return False
    # The kernel learned to continue a referred call later than to refer one.
    return release >= (5, 5)


def restrict(own_pid: int, *, unix_sockets: bool) -> list[int]:
    """Restrict the system calls of this thread and all its children from now on.

    `PR_SET_NO_NEW_PRIVS` must be set.

    Returns:
        The descriptor on which the daemon decides calls that name another process; empty where a
        container's filter already refers calls, which the kernel allows only once: then all such
        calls are refused, even those that name processes of the model.

    Raises:
        OSError: the kernel refuses the filter.
    """
    try:
        return [_install(own_pid, USER_NOTIF, _NEW_LISTENER, unix_sockets=unix_sockets)]
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
    _install(own_pid, _ERRNO | errno.EPERM, 0, unix_sockets=unix_sockets)
    return []


def _install(own_pid: int, of_others: int, flags: int, *, unix_sockets: bool) -> int:
    machine = platform.machine()
    program = filter_program(machine, own_pid, of_others, unix_sockets=unix_sockets)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    memory = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog; native alignment puts the pointer where C does.
    fprog = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(memory)))
    return _seccomp(_SET_MODE_FILTER, flags, fprog)


def decide(listener: int, session: int) -> None:
    """Allow or refuse the system call that waits at `listener`; the daemon calls this.

    The kernel suspends a call that names a process other than the caller. The daemon allows the
    call where it names a process that the model started: such a process is in the session that the
    model's process leads, and cannot leave that session. The calls have numbers as arguments, so
    the arguments cannot change after the decision.

    Args:
        listener: what `restrict` returned.
        session: session of the processes that the call may name.
    """
    memory = bytearray(_NOTIFICATION.size)
    # The caller may have been killed meanwhile.
    with suppress(OSError):
        fcntl.ioctl(listener, _RECEIVE, memory)
        number, _, _, nr, _, _, *arguments = _NOTIFICATION.unpack(memory)
        column = ARCHITECTURES[platform.machine()].column
        place = next(place for of, place in OF_A_PROCESS.values() if of[column] == nr)
        if _session_of(arguments[place] & 0xFFFFFFFF) == session:
            response = _RESPONSE.pack(number, 0, 0, _CONTINUE)
        else:
            response = _RESPONSE.pack(number, 0, -errno.EPERM, 0)
        fcntl.ioctl(listener, _SEND, bytearray(response))


def _session_of(pid: int) -> int | None:
    """Return the session of that process or thread; None if no such process exists, or `pid` is
    negative (a process group)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name may hold any character; after it follow state, parent, group, session.
    return int(stat.rpartition(")")[2].split()[3])


def filter_program(
    machine: str, own_pid: int, of_others: int = USER_NOTIF, *, unix_sockets: bool
) -> list[Instruction]:
    """Return the program that the kernel runs at each system call, in classic BPF.

    Args:
        machine: the architecture, as uname(2) reports it.
        own_pid: the process whose calls name itself freely.
        of_others: the action for a call that names another process.
        unix_sockets: whether Unix stream sockets are allowed.
    """
    audit, column = ARCHITECTURES[machine]
    program = [
        (_LD, 0, 0, _ARCH_AT),
        # Programs of another architecture have other call numbers.
        (_JEQ, 1, 0, audit),
        _error(errno.EPERM),
        (_LD, 0, 0, _NR_AT),
    ]
    if machine == "x86_64":
        program += [(_JGE, 0, 1, _X32), _error(errno.ENOSYS)]
    for table, result in ((REFUSED, errno.EPERM), (UNKNOWN, errno.ENOSYS), (WITHOUT_EFFECT, 0)):
        for numbers in table.values():
            if numbers[column] != NONE:
                program += [(_JEQ, 0, 1, numbers[column]), _error(result)]
    for numbers, argument, values in REFUSED_VALUES.values():
        body = [_load(argument)]
        for value in values:
            body += [(_JEQ, 0, 1, value), _error(errno.EPERM)]
        program += _of(numbers[column], body)
    for name, (numbers, argument) in OF_A_PROCESS.items():
        body = []
        if name in OF_THE_USER:
            body += [_load(0), (_JEQ, 0, 1, OF_THE_USER[name]), _error(errno.EPERM)]
        body.append(_load(argument))
        # -own_pid is the process group that this process leads.
        own = (0, own_pid, (-own_pid) & 0xFFFFFFFF) if name == "kill" else (0, own_pid)
        for value in own:
            body += [(_JEQ, 0, 1, value), (_RET, 0, 0, _ALLOW)]
        program += _of(numbers[column], [*body, (_RET, 0, 0, of_others)])
    clone = [_load(0), (_JSET, 0, 1, REFUSED_OF_CLONE), _error(errno.EPERM)]
    program += _of(CLONE[column], clone)
    if not unix_sockets:
        program += _of(SOCKET[column], _no_unix_stream())
    return [*program, (_RET, 0, 0, _ALLOW)]


def _no_unix_stream() -> list[Instruction]:
    """Refuse Unix stream sockets, the only kind on which gRPC listens; socket pairs use another
    call."""
    return [
        _load(0),
        (_JEQ, 0, 4, _AF_UNIX),
        _load(1),
        (_AND, 0, 0, _SOCK_TYPE),
        (_JEQ, 0, 1, _SOCK_STREAM),
        _error(errno.EACCES),
    ]


def _of(number: int, body: list[Instruction]) -> list[Instruction]:
    """Apply `body` to that call, which is allowed at the body's end; other calls skip the body."""
    return [(_JEQ, 0, len(body) + 1, number), *body, (_RET, 0, 0, _ALLOW)]


def _load(argument: int) -> Instruction:
    return (_LD, 0, 0, _ARGUMENTS_AT + _ARGUMENT_BYTES * argument)


def _error(number: int) -> Instruction:
    return (_RET, 0, 0, _ERRNO | number)


def _seccomp(operation: int, flags: int, argument: object) -> int:
    number = _SYS_SECCOMP[platform.machine()]
    return system_call("seccomp", number, operation, flags, argument)
