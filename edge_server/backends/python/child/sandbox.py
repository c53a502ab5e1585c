"""The sandbox of a model's process: what this kernel offers, and its application before any code of
the model runs.

The sandbox is applied while the process has one thread: most rules hold only for the calling thread
and its children. So no module that might start threads is imported before.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edge_server.backends.python.child import landlock, seccomp
from edge_server.backends.python.messages import SandboxRules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.settings import Python

# linux/prctl.h, linux/capability.h
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES_VERSION = 0x20080522
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2

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


class Offer(NamedTuple):
    """`landlock` is the kernel's Landlock version, 0 is none."""

    landlock: int
    seccomp: bool

    def lacks(self) -> list[str]:
        """Return the restrictions that the kernel cannot enforce, a line for each."""
        lines = []
        if not self.landlock:
            lines.append(
                "no Landlock (Linux 5.13 with landlock in CONFIG_LSM): models can read and write "
                "every file that the daemon's user can, its secrets and copies of models too"
            )
        if not self.seccomp:
            lines.append(
                "no seccomp filters that ask (Linux 5.5 on x86-64 or aarch64): models can signal "
                "the daemon, and what they start can outlive them"
            )
        return lines


def offered() -> Offer:
    """Probe this kernel now."""
    return Offer(landlock.version(), seccomp.is_offered())


def rules_of(settings: Python, offer: Offer) -> SandboxRules:
    """Return the sandbox rules of a process."""
    if settings.sandbox == "off":
        return SandboxRules()
    return SandboxRules(
        True,
        offer.landlock,
        offer.seccomp,
        settings.unix_sockets is not False,
        settings.readable,
        settings.writable,
        settings.private,
    )


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
        landlock.restrict(list(_openings(rules, model_directory)), rules.landlock)
    if rules.seccomp:
        return seccomp.restrict(os.getpid(), unix_sockets=rules.unix_sockets)
    return []


def _openings(rules: SandboxRules, model_directory: str) -> Iterator[tuple[str, int]]:
    private = [os.path.realpath(path) for path in (*_PRIVATE, *rules.private)]
    interpreter = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path}
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for path in (*_SYSTEM, *_ALSO, *interpreter, *libraries, *rules.readable):
        if path and os.path.realpath(path) != "/":
            yield from _around(os.path.realpath(path), private, landlock.READ)
    for path in rules.writable:
        yield from _around(os.path.realpath(path), private, landlock.WRITE)
    # TMPDIR is the process's own.
    for path in (os.environ["TMPDIR"], _SHARED_MEMORY):
        yield path, landlock.WRITE
    yield model_directory, landlock.READ
    for name in _DEVICES:
        yield f"/dev/{name}", landlock.DEVICE & ~landlock.IOCTL_DEVICE
    for entry in Path("/dev").iterdir():
        of_gpu = entry.name.startswith(_GPU_DEVICES) and not entry.name.startswith(_NO_GPU_DEVICES)
        if of_gpu and not entry.is_block_device():
            yield str(entry), landlock.DEVICE


def _around(path: str, private: list[str], rights: int) -> Iterator[tuple[str, int]]:
    """Yield rules for `path` without the private directories in it, whose parents can only be
    listed."""
    if any(_holds(each, path) for each in private):
        return
    if not any(_holds(path, each) for each in private):
        yield path, rights
        return
    yield path, landlock.LIST
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
