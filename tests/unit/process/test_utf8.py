"""Any text becomes UTF-8, and a byte of a file name that is not is shown in one way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_server.process.text import as_utf8, shown


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_can_be_sent(text: str) -> None:
    as_utf8(text).encode()
    assert shown(text).isprintable()


def test_a_byte_that_is_no_text_is_shown_as_a_byte() -> None:
    assert as_utf8("a\udcff\nä") == "a\\xff\nä"
    assert shown("a\udcff\nä") == r"a\xff\nä"
    assert as_utf8("\ud800") == r"\ud800"
