"""Masking: no text shows a password, in whatever form the text has it."""

from __future__ import annotations

import json
import logging
import re
from base64 import b64encode
from urllib.parse import quote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from edge_server.process import text as masking
from edge_server.process.logs import LogFormatter, LogSwitches
from edge_server.process.text import MASK, masked, masked_by_place, remember_login


@pytest.fixture(autouse=True)
def _no_secrets_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_patterns", ())


# Passwords that differ from every other text of these tests.
passwords = st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)), max_size=20).map(
    lambda text: f"q8Zr{text}"
)


@given(passwords)
def test_a_password_is_masked_raw_encoded_and_as_basic_authentication(password: str) -> None:
    remember_login("eve", password)
    basic = b64encode(f"eve:{password}".encode()).decode()
    forms = {password, quote(password), quote(password, safe=""), basic}
    forms.add(re.sub("%..", lambda encoded: encoded[0].lower(), quote(password)))
    forms.add(repr(password)[1:-1]) if password.isprintable() else None
    for form in forms:
        text = masked(f"cannot open rtsp://eve:{form}@cam/1: denied")
        assert form not in text
        assert text.endswith("@cam/1: denied")


def test_a_partly_encoded_password_is_masked() -> None:
    remember_login("eve", "q8/w@y:9%")
    assert masked("q8%2Fw@y%3a9% and q8/w%40y:9%25") == f"{MASK} and {MASK}"


def test_a_very_short_password_hides_only_its_place_in_a_uri() -> None:
    remember_login("eve", "11")
    assert masked("camera 11 of rtsp://eve:11@cam") == f"camera 11 of rtsp://eve:{MASK}@cam"


def test_an_empty_password_masks_nothing() -> None:
    remember_login("guest", "")
    assert masked("guest: no password") == "guest: no password"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("src location=rtsp://a:kl7@x/1 ! decodebin", "src location=rtsp://***@x/1 ! decodebin"),
        ("rtspsrc user-id=a user-pw=kl7mm ! x", "rtspsrc user-id=a user-pw=*** ! x"),
        ('rtspsrc user-pw="kl7 pp" ! x', "rtspsrc user-pw=*** ! x"),
        ("rtsp://h/user=a&password=kl7nn&channel=1", "rtsp://h/user=a&password=***&channel=1"),
        ("https://h/v1?api_key=kl7oo&x=1", "https://h/v1?api_key=***&x=1"),
        ("http://h/video?passwort=kl7qq", "http://h/video?passwort=***"),
        ("a stray rtsp://a:k@l7@h/1 b", "a stray rtsp://***@h/1 b"),
    ],
)  # fmt: skip
def test_a_password_is_masked_by_its_place(text: str, shown: str) -> None:
    assert masked_by_place(text) == shown


@pytest.mark.parametrize("as_json", [False, True])
@given(passwords)
def test_no_log_line_shows_a_password(as_json: bool, password: str) -> None:
    remember_login("eve", password)
    assume(password.isprintable())
    formatter = LogFormatter(LogSwitches(""), json=as_json)
    error = ValueError(f"bad rtsp://eve:{quote(password, safe='')}@cam")
    failure = (ValueError, error, None)
    record = logging.LogRecord("x", logging.ERROR, __file__, 1, "opened %s", (password,), failure)
    line = formatter.format(record)
    text = "".join(json.loads(line).values()) if as_json else line
    assert password not in text
    assert quote(password, safe="") not in text
    assert text.count(MASK) >= 2
