"""Landlock: restrict the files that this process and all its children may open.

The numbers are those of linux/landlock.h; the system calls have the same numbers on all
architectures.
"""

from __future__ import annotations

import ctypes
import os
import stat
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from edge_server.backends.python.child.system_calls import system_call

if TYPE_CHECKING:
    from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = (1 << n for n in range(4))
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_TRUNCATE, IOCTL_DEVICE = 1 << 14, 1 << 15
# Number of rights in each version: 2 added REFER, 3 TRUNCATE, 5 IOCTL_DEV. From 6 on, signals and
# abstract sockets end at the border of the sandbox.
_RIGHTS_OF = {1: 13, 2: 14, 3: 15, 4: 15}
_MOST_RIGHTS = 16
_SCOPES_FROM = 6
_ALL_SCOPES = 3
_OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | _TRUNCATE | IOCTL_DEVICE

READ = EXECUTE | READ_FILE | READ_DIR
LIST = READ_DIR
DEVICE = READ_FILE | WRITE_FILE | READ_DIR | _TRUNCATE | IOCTL_DEVICE
WRITE = ((1 << _MOST_RIGHTS) - 1) & ~(_MAKE_CHAR | _MAKE_BLOCK | IOCTL_DEVICE)


_call = partial(system_call, "Landlock")


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


def version() -> int:
    """Return the version of the kernel's Landlock; 0 without Landlock."""
    try:
        return _call(_CREATE_RULESET, None, 0, _VERSION)
    except OSError:
        return 0


def restrict(rules: Iterable[tuple[str, int]], abi: int) -> None:
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
    ruleset = _call(_CREATE_RULESET, ctypes.byref(attr), ctypes.sizeof(attr), 0)
    try:
        for path, rights in rules:
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                _add(ruleset, path, rights & handled)
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _add(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _OF_A_FILE
        beneath = _PathBeneathAttr(rights, fd)
        if rights:
            _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(beneath), 0)
    finally:
        os.close(fd)
