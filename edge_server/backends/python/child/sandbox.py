"""The sandbox of a model's process: what this kernel offers, and its application before any code of
the model runs.

The sandbox is applied while the process has one thread: most rules hold only for the calling thread
and its children. So no module that might start threads is imported before.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import edge_server
from edge_server.backends.python.child import seccomp
from edge_server.backends.python.child.seccomp import system_call
from edge_server.backends.python.messages import SandboxRules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from edge_server.settings import Python

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
    """Return the sandbox rules of a process on this kernel, as it is now."""
    if settings.sandbox == "off":
        return SandboxRules()
    return SandboxRules(
        True,
        landlock_version(),
        seccomp.is_offered(),
        settings.unix_sockets is not False,
        settings.readable,
        settings.writable,
        settings.private,
    )


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


def close_off(rules: SandboxRules, model_directory: str) -> list[int]:
    """Restrict this process to `rules`, as far as the kernel supports them.

    Returns:
        The descriptor on which the daemon decides system calls; empty where no filter refers calls.

    Raises:
        OSError: the kernel supports a rule but fails to apply it.
    """
    if not rules.closed:
        return []
    if _libc().prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))) < 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    _drop_capabilities()
    if rules.landlock:
        _restrict_files(list(_openings(rules, model_directory)), rules.landlock)
    if rules.seccomp:
        return seccomp.restrict(os.getpid(), unix_sockets=rules.unix_sockets)
    return []


def _openings(rules: SandboxRules, model_directory: str) -> Iterator[tuple[str, int]]:
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
    yield model_directory, _READ
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
        # A symlink opens its target, which has a rule of its own.
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


class _RulesetAttr(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneathAttr(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 without Landlock."""
    try:
        return _landlock(_CREATE_RULESET, None, 0, _LANDLOCK_VERSION)
    except OSError:
        return 0


def _restrict_files(rules: Iterable[tuple[str, int]], abi: int) -> None:
    """Restrict the files of this thread and all its children to `rules` from now on.

    `PR_SET_NO_NEW_PRIVS` must be set.

    Args:
        rules: path → allowed accesses to the path and everything below; missing paths are skipped.
        abi: the version to use.

    Raises:
        OSError: the kernel refuses the rules.
    """
    handled = (1 << _RIGHTS_OF.get(abi, _MOST_RIGHTS)) - 1
    scoped = _ALL_SCOPES if abi >= _SCOPES_FROM else 0
    # An older kernel accepts unknown trailing fields that are 0.
    attr = _RulesetAttr(handled, 0, scoped)
    ruleset = _landlock(_CREATE_RULESET, ctypes.byref(attr), ctypes.sizeof(attr), 0)
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
        beneath = _PathBeneathAttr(rights, fd)
        if rights:
            _landlock(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(beneath), 0)
    finally:
        os.close(fd)
