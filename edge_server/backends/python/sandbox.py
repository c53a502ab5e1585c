"""The sandbox of a model's process: what this kernel offers, and its application before any code of
the model runs.

The sandbox is applied while the process has one thread: most rules hold only for the calling thread
and its children. So no module that might start threads is imported before.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import stat
import struct
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import edge_server
from edge_server.backends.python.messages import SandboxRules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from edge_server.settings import Python


class Architecture(NamedTuple):
    """`audit` is the architecture's number in a filter (linux/audit.h); `column` is its column
    in the tables below."""

    audit: int
    column: int


ARCHITECTURES = {"x86_64": Architecture(0xC000003E, 0), "aarch64": Architecture(0xC00000B7, 1)}

Numbers = tuple[int, int]
NONE = -1

# Calls that reach into other processes, or into the kernel; no computation needs them.
REFUSED: dict[str, Numbers] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "kcmp": (312, 272),
    "tkill": (200, 130),
    "pidfd_getfd": (438, 438),
    # The descriptor may belong to any process.
    "pidfd_send_signal": (424, 424),
    "setns": (308, 268),
    "unshare": (272, 97),
    "open_by_handle_at": (304, 265),
    # Landlock does not cover these, whatever file they name; truncate up to Linux 6.1.
    "truncate": (76, 45),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # io_uring makes calls that no filter sees.
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "syslog": (103, 116),
    # System V's queues, semaphores and shared memory outlive who made them, and any process of the
    # user may open them.
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
}

# These return 0 and change nothing, so that programs that happen to call them still run.
WITHOUT_EFFECT: dict[str, Numbers] = {
    # A model's children stay in its group and session, by which the daemon identifies and ends
    # them.
    "setsid": (112, 157),
    "setpgid": (109, 154),
    # Landlock does not cover these for files of the daemon's user: its keys and state, and the
    # files of other models. Times stay allowed: `Path.touch` makes a file only where setting its
    # time fails, and models are compared by content.
    "chmod": (90, NONE),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, NONE),
    "lchown": (94, NONE),
    "fchown": (93, 55),
    "fchownat": (260, 54),
}

# clone3's flags lie in memory that no filter can read; libraries fall back to `clone`.
UNKNOWN: dict[str, Numbers] = {"clone3": (435, 435)}

# The argument that names a process; 0 is the caller.
OF_A_PROCESS: dict[str, tuple[Numbers, int]] = {
    "kill": ((62, 129), 0),
    "tgkill": ((234, 131), 0),
    "rt_sigqueueinfo": ((129, 138), 0),
    "rt_tgsigqueueinfo": ((297, 240), 0),
    "sched_setaffinity": ((203, 122), 0),
    "sched_setscheduler": ((144, 119), 0),
    "sched_setparam": ((142, 118), 0),
    "sched_setattr": ((314, 274), 0),
    "prlimit64": ((302, 261), 0),
    "setpriority": ((141, 140), 1),
    "ioprio_set": ((251, 30), 1),
}

# Argument, and its refused values.
REFUSED_VALUES: dict[str, tuple[Numbers, int, tuple[int, ...]]] = {
    # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals through a descriptor.
    "fcntl": ((72, 25), 1, (8, 10, 15)),
    # TIOCSTI, TIOCLINUX: terminal input; FIOSETOWN, SIOCSPGRP: signals through a descriptor.
    "ioctl": ((16, 29), 1, (0x5412, 0x541C, 0x8901, 0x8902)),
}

# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET; and CLONE_PARENT, which makes a
# child of the daemon: its zombie would stay as long as the daemon runs.
CLONE: Numbers = (56, 220)
REFUSED_OF_CLONE = 0x7E020000 | 0x8000
SOCKET: Numbers = (41, 198)
# PRIO_USER, IOPRIO_WHO_USER: all processes of the user.
OF_THE_USER = {"setpriority": 2, "ioprio_set": 3}


def system_call(name: str, number: int, *arguments: object) -> int:
    """Make a system call that the C library may lack; `name` is for the text of the error."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    as_long = (ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
    returned: int = libc.syscall(ctypes.c_long(number), *as_long)
    if returned < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return returned


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


def seccomp_offered() -> bool:
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


def restrict_system_calls(own_pid: int, *, unix_sockets: bool) -> list[int]:
    """Restrict the system calls of this thread and all its children from now on;
    `PR_SET_NO_NEW_PRIVS` must be set.

    Returns: The descriptor on which the daemon decides calls that name another process; empty where
        a container's filter already refers calls, which the kernel allows only once: then all such
        calls are refused, even those that name processes of the model."""
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
    fprog = struct.pack("@HP", len(program), ctypes.addressof(memory))
    return _seccomp(_SET_MODE_FILTER, flags, fprog)


def decide(listener: int, session: int) -> None:
    """Allow or refuse the system call that waits at `listener`; the daemon calls this. The kernel
    suspends a call that names another process. It is allowed where that is in `session`, which the
    model's process leads, and which what it starts cannot leave. The arguments are numbers, so they
    cannot change after the decision."""
    memory = bytearray(_NOTIFICATION.size)
    # The caller may have been killed.
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
    """Return the program that the kernel runs at each system call, in classic BPF; `of_others` is
    the action for a call that names another process than `own_pid`."""
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
    return [(_JEQ, 0, len(body) + 1, number), *body, (_RET, 0, 0, _ALLOW)]


def _load(argument: int) -> Instruction:
    return (_LD, 0, 0, _ARGUMENTS_AT + _ARGUMENT_BYTES * argument)


def _error(number: int) -> Instruction:
    return (_RET, 0, 0, _ERRNO | number)


def _seccomp(operation: int, flags: int, argument: object) -> int:
    number = _SYS_SECCOMP[platform.machine()]
    return system_call("seccomp", number, operation, flags, argument)


# linux/prctl.h, linux/capability.h
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES_VERSION = 0x20080522
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2

# linux/landlock.h; the system calls have the same numbers on all architectures.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_LANDLOCK_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << n for n in range(4))
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
# Number of rights in each version: 2 added REFER, 3 TRUNCATE, 5 IOCTL_DEV. From 6 on, signals and
# abstract sockets end at the border of the sandbox.
_RIGHTS_OF = {1: 13, 2: 14, 3: 15, 4: 15}
_MOST_RIGHTS = 16
_SCOPES_FROM = 6
_ALL_SCOPES = 3
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE

_READ = _EXECUTE | _READ_FILE | _READ_DIR
_LIST = _READ_DIR
_DEVICE = _READ_FILE | _WRITE_FILE | _READ_DIR | _TRUNCATE | _IOCTL_DEVICE
_WRITE = ((1 << _MOST_RIGHTS) - 1) & ~(_MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEVICE)
_landlock = partial(system_call, "Landlock")

# Directories that programs, libraries and the interpreter read. The rest of /run and /var belongs
# to other services.
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/opt", "/etc", "/proc", "/sys")
_ALSO = ("/run/systemd/resolve", "/var/cache/fontconfig", "/var/lib/nvidia")
# The daemon's secrets.
_PRIVATE = ("/etc/edge_server",)
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# GPU device files, also on boards; nvme and nvram are disks.
_GPU_DEVICES = ("nv", "tegra", "host1x", "dri", "dma_heap", "kfd")
_NO_GPU_DEVICES = ("nvme", "nvram")
# Holds semaphores of `multiprocessing`, and tensors that workers share.
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the kernel's own place


def rules_of(settings: Python) -> SandboxRules:
    if settings.sandbox == "off":
        return SandboxRules()
    return SandboxRules(
        True,
        landlock_version(),
        seccomp_offered(),
        settings.unix_sockets is not False,
        settings.readable,
        settings.writable,
        settings.private,
    )


def working_directory(rules: SandboxRules) -> str:
    """Return the daemon's working directory; empty where `rules` do not open it by its path: a
    model that writes files by their names alone then has them in its temporary directory."""
    own = str(Path.cwd())
    opened = map(os.path.realpath, (*rules.readable, *rules.writable))
    is_open = not (rules.closed and rules.landlock) or any(_holds(each, own) for each in opened)
    return own if is_open else ""


def lacking(rules: SandboxRules) -> list[str]:
    """Return the restrictions that the kernel cannot enforce, a line for each."""
    lines = []
    if rules.closed and not rules.landlock:
        lines.append(
            "no Landlock (Linux 5.13 with landlock in CONFIG_LSM): models can read and write "
            "every file that the daemon's user can, its secrets and copies of models too"
        )
    if rules.closed and not rules.seccomp:
        lines.append(
            "no seccomp user notification (Linux 5.5 on x86-64 or aarch64): models can signal "
            "the daemon, and what they start can outlive them"
        )
    return lines


def close_off(rules: SandboxRules, opened: Sequence[str]) -> list[int]:
    """Restrict this process to `rules`, as far as the kernel supports them, with `opened`, which it
    may read wherever they are; return the descriptor on which the daemon decides system calls, if
    any."""
    if not rules.closed:
        return []
    if _libc().prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))) < 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    _drop_capabilities()
    if rules.landlock:
        _restrict_files(list(_openings(rules, opened)), rules.landlock)
    if rules.seccomp:
        return restrict_system_calls(os.getpid(), unix_sockets=rules.unix_sockets)
    return []


def _openings(rules: SandboxRules, opened: Sequence[str]) -> Iterator[tuple[str, int]]:
    private = [os.path.realpath(path) for path in (*_PRIVATE, *rules.private)]
    interpreter = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path, *edge_server.__path__}
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for path in (*_SYSTEM, *_ALSO, *interpreter, *libraries, *rules.readable):
        if path and os.path.realpath(path) != "/":
            yield from _around(os.path.realpath(path), private, _READ)
    for path in rules.writable:
        yield from _around(os.path.realpath(path), private, _WRITE)
    # TMPDIR is the process's own.
    for path in (os.environ["TMPDIR"], _SHARED_MEMORY):
        yield path, _WRITE
    yield from ((path, _READ) for path in opened if path)
    for name in _DEVICES:
        yield f"/dev/{name}", _DEVICE & ~_IOCTL_DEVICE
    for entry in Path("/dev").iterdir():
        of_gpu = entry.name.startswith(_GPU_DEVICES) and not entry.name.startswith(_NO_GPU_DEVICES)
        if of_gpu and not entry.is_block_device():
            yield str(entry), _DEVICE


def _around(path: str, private: list[str], rights: int) -> Iterator[tuple[str, int]]:
    """Yield rules for `path` without the private directories in it, whose parents can only be
    listed."""
    if any(_holds(each, path) for each in private):
        return
    if not any(_holds(path, each) for each in private):
        yield path, rights
        return
    yield path, _LIST
    try:
        entries = list(Path(path).iterdir())
    except OSError:
        return
    for entry in entries:
        # A symlink opens its target, which has its own rule.
        if not entry.is_symlink():
            yield from _around(str(entry), private, rights)


def _holds(path: str, other: str) -> bool:
    return other == path or other.startswith(path.rstrip("/") + "/")


def _drop_capabilities() -> None:
    """Drop all capabilities except those that root needs to read files of other users."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    kept = 1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH
    # Effective, permitted, inheritable; twice, 32 capabilities each. The masks never add a
    # capability.
    had = (ctypes.c_uint32 * 6)()
    libc = _libc()
    if libc.capget(header, had) < 0:
        raise OSError(ctypes.get_errno(), "capget")
    data = (ctypes.c_uint32 * 6)(had[0] & kept, had[1] & kept, 0, 0, 0, 0)
    if libc.capset(header, data) < 0:
        raise OSError(ctypes.get_errno(), "capset")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    try:
        return _landlock(_CREATE_RULESET, None, 0, _LANDLOCK_VERSION)
    except OSError:
        return 0


def _restrict_files(rules: Iterable[tuple[str, int]], abi: int) -> None:
    """Restrict the files of this thread and all its children to `rules`: a path, and the accesses
    to it and everything below; missing paths are skipped. `PR_SET_NO_NEW_PRIVS` must be set."""
    handled = (1 << _RIGHTS_OF.get(abi, _MOST_RIGHTS)) - 1
    scoped = _ALL_SCOPES if abi >= _SCOPES_FROM else 0
    # struct landlock_ruleset_attr; an older kernel accepts unknown trailing fields that are 0.
    attr = struct.pack("=QQQ", handled, 0, scoped)
    ruleset = _landlock(_CREATE_RULESET, attr, len(attr), 0)
    try:
        for path, rights in rules:
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                _add(ruleset, path, rights & handled)
        _landlock(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _add(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _OF_A_FILE
        if rights:
            # struct landlock_path_beneath_attr
            beneath = struct.pack("=Qi", rights, fd)
            _landlock(_ADD_RULE, ruleset, _PATH_BENEATH, beneath, 0)
    finally:
        os.close(fd)
