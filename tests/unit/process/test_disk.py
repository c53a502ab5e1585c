"""What is wrong with a place decides whether another start may help."""

from __future__ import annotations

import errno

import pytest

from edge_server.errors import SettingsError, Unavailable
from edge_server.process.disk import error_of_place


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ENOSPC, errno.EIO])
def test_what_a_mount_or_room_would_mend_may_pass(number: int) -> None:
    error = error_of_place(OSError(number, "why"), "log.file: why")
    assert type(error) is Unavailable
    assert str(error) == "log.file: why"


@pytest.mark.parametrize("number", [errno.ELOOP, errno.EISDIR, errno.EEXIST, errno.ENOTDIR])
def test_something_of_another_kind_stays(number: int) -> None:
    assert type(error_of_place(OSError(number, "why"), "why")) is SettingsError
