"""What is wrong with a path decides whether another start may help; any name can be sent."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import SettingsError, Unavailable
from edge_server.process.paths import as_utf8, error_of_place, shown


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ENOSPC, errno.EIO])
def test_what_a_mount_or_room_would_mend_may_pass(number: int) -> None:
    error = error_of_place(OSError(number, "why"), "log.file: why")
    assert type(error) is Unavailable
    assert str(error) == "log.file: why"


@pytest.mark.parametrize("number", [errno.ELOOP, errno.EISDIR, errno.EEXIST, errno.ENOTDIR])
def test_something_of_another_kind_stays(number: int) -> None:
    assert type(error_of_place(OSError(number, "why"), "why")) is SettingsError


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_can_be_sent(text: str) -> None:
    as_utf8(text).encode()
    assert shown(text).isprintable()


def test_a_byte_that_is_no_text_is_shown_as_a_byte() -> None:
    assert as_utf8("a\udcff\nä") == "a\\xff\nä"
    assert shown("a\udcff\nä") == r"a\xff\nä"
    assert as_utf8("\ud800") == r"\ud800"
