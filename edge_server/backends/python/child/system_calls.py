"""System calls that Python models do not need: their numbers, and the filter's decision on each.

Calls that need a capability (mounts, kernel modules, clocks, reboot) are not here: the sandbox has
dropped it, and no user namespace can give it back.

Numbers: arch/x86/entry/syscalls/syscall_64.tbl for x86-64, include/uapi/asm-generic/unistd.h for
aarch64, each from Linux 6.17; they never change.
"""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple


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
    """Make a system call that the C library may lack; `name` is for the text of the error.

    Raises:
        OSError: the kernel refuses the call.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    as_long = (ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
    returned: int = libc.syscall(ctypes.c_long(number), *as_long)
    if returned < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return returned
