"""URIs: what a camera gets of them, and that nobody sees a password."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.cameras.source import SOURCE_KINDS, is_live, open_source
from edge_server.cameras.source_uri import (
    Credentials,
    masked_uri,
    parse_source_uri,
    read_credentials,
)
from edge_server.errors import SettingsError, SourceError, SourceUriError
from edge_server.process.text import masked

if TYPE_CHECKING:
    from pathlib import Path

AWKWARD = "q8Zr@:/#%[]"
# Every kind, also those whose options only their opener checks, refuses every option.
STRICT = {
    scheme: replace(kind, check=lambda uri, check=kind.check: (check(uri), uri.allow("none")))
    for scheme, kind in SOURCE_KINDS.items()
}
logins = st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)), min_size=1, max_size=12)


def test_the_parts_of_a_camera_uri() -> None:
    uri = parse_source_uri("RTSP://eve:pa%40ss@Cam:8554/live%20one?channel=1&transport=udp&x=%31")
    assert (uri.scheme, uri.host, uri.port, uri.path) == ("rtsp", "cam", 8554, "/live one")
    assert uri.credentials == Credentials("eve", "pa@ss")
    assert uri.label == "rtsp://cam:8554/live one"
    assert uri.query["transport"] == "udp"
    assert uri.address("transport") == "rtsp://cam:8554/live%20one?channel=1&x=%31"
    assert uri.address(login="eve:x").startswith("rtsp://eve:x@cam:8554/live%20one?channel=1&tr")


@pytest.mark.parametrize(
    "text",
    ["http://cam/video.mjpg", "http://cam/cgi?720p", "http://cam:81/?a=1&a=2&b", "rtsp://[fe80::1]/x"],
)  # fmt: skip
def test_a_network_camera_gets_its_own_uri_unchanged(text: str) -> None:
    assert parse_source_uri(text).address("transport") == text


@given(user=logins.filter(lambda text: ":" not in text), password=logins)
def test_encoded_credentials_arrive_and_are_in_no_text(user: str, password: str) -> None:
    password = f"q8Zr{password}"
    text = f"rtsp://{quote(user, safe='')}:{quote(password, safe='')}@cam:554/live?channel=1"
    uri = parse_source_uri(text)
    assert uri.credentials == Credentials(user, password)
    for shown in (uri.label, uri.address(), masked_uri(text), repr(uri.credentials), repr(uri)):
        assert password not in shown
        assert quote(password, safe="") not in shown


@given(
    password=logins.map(lambda text: f"q8Zr{text}"), scheme=st.sampled_from([*SOURCE_KINDS, "rstp"])
)
def test_no_error_of_a_wrong_uri_shows_a_password(password: str, scheme: str) -> None:
    for text in (f"{scheme}://eve:{password}@cam/x?lop=1", f"{scheme}://eve:{password}@[cam/x"):
        for refuse in (partial(open_source, kinds={}), partial(is_live, kinds=STRICT)):
            with pytest.raises(SourceUriError) as caught:
                refuse(text)
            assert password not in str(caught.value)
        assert password not in masked_uri(text)


def test_a_bracket_in_a_password_is_refused_though_the_host_has_the_other_one() -> None:
    with pytest.raises(SourceUriError, match="malformed"):
        parse_source_uri("rtsp://eve:q8Zr]@[cam/x")


@pytest.mark.parametrize("character", "@/#?%[]")
def test_a_password_with_a_bare_separator_is_refused_with_its_encoding(character: str) -> None:
    for password in (f"q8{character}Zr", f"12{character}z4"):
        with pytest.raises(SourceUriError, match="malformed") as caught:
            is_live(f"rtsp://eve:{password}@cam/live")
        assert quote(character, safe="") in str(caught.value)
        assert password not in str(caught.value)


def test_a_colon_in_a_password_needs_no_encoding() -> None:
    assert parse_source_uri("rtsp://eve:a:b@cam/x").credentials == Credentials("eve", "a:b")


def test_a_user_without_a_password() -> None:
    assert parse_source_uri("rtsp://eve@cam/x").credentials == Credentials("eve", "")
    assert parse_source_uri("rtsp://cam/x").credentials is None


def test_passwords_in_path_query_and_pipeline_are_not_shown() -> None:
    dvr = parse_source_uri("rtsp://cam/user=eve&password=q8Zr1&channel=1?pwd=q8Zr2")
    assert dvr.label == "rtsp://cam/user=eve&password=***&channel=1"
    assert "q8Zr1" in dvr.address()
    pipeline = parse_source_uri(
        "gst:rtspsrc location=rtsp://e:q8Zr3@cam/x user-pw=q8Zr4 ! decodebin"
    )
    assert pipeline.path.endswith("user-pw=q8Zr4 ! decodebin")
    assert pipeline.label == "gst:rtspsrc location=rtsp://***@cam/x user-pw=*** ! decodebin"


@pytest.mark.parametrize(
    "text",
    [
        "rtsp:/eve:{}@cam/x",
        "rtsp:eve:{}@cam/x",
        "rtsp//eve:{}@cam/x",
        "rtsp/eve:{}@cam/x",
        r"RTSP:\\eve:{}@cam\x",
        " https;//eve:{}@cam/x",
        "eve:{}@cam/x",
        "eve:{}@rtsp://cam/x",
        "rtsp:eve:{}@cam://x",
        "rtsp:///eve:{}@cam/x",
        "rtsp//eve:{}@cam/x://",
    ],
)
def test_no_error_of_a_mistyped_camera_shows_its_password(text: str) -> None:
    text = text.format("q8Zrmistyped")
    assert "q8Zr" not in masked(masked_uri(text))
    with pytest.raises(SourceError) as caught:
        open_source(text)
    assert "q8Zr" not in masked(str(caught.value))


@pytest.mark.parametrize("scheme", ["rtsp", "rtsps", "http", "https"])
def test_a_camera_uri_without_its_slashes_is_no_file(scheme: str) -> None:
    for text in (f"{scheme}:/cam/x", f"{scheme.upper()}//cam/x", f"{scheme}:cam"):
        with pytest.raises(SourceUriError, match=f"write {scheme}://user:password@host/path"):
            is_live(text)


@pytest.mark.parametrize("path", ["http/road.mp4", "./rtsp:1.mp4", "a@b.mp4", r"D:\a@b.mp4"])
def test_a_path_that_only_resembles_a_camera_is_a_file(path: str) -> None:
    uri = parse_source_uri(path)
    assert (uri.scheme, uri.path, uri.label) == ("file", path, path)


def test_passwords_in_a_pipeline_are_known_wherever_they_appear() -> None:
    parse_source_uri("gst:rtspsrc location=rtsp://e:q8Zr%405@cam/x ! fakesink")
    parse_source_uri("http://cam/x?loginuse=e&loginpas=q8Zr6&userpwd=q8Zr7")
    text = "no q8Zr@5, q8Zr%405, q8Zr6, q8Zr7"
    assert masked(text) == "no ***, ***, ***, ***"


@pytest.mark.parametrize(
    ("text", "scheme", "path"),
    [
        ("/dev/video0", "v4l2", "/dev/video0"),
        ("/dev/v4l/by-path/usb-1", "v4l2", "/dev/v4l/by-path/usb-1"),
        ("v4l2:///dev/video12?width=640&height=480", "v4l2", "/dev/video12"),
        ("/dev/videos/road.mp4", "file", "/dev/videos/road.mp4"),
        ("gst:videotestsrc ! video/x-raw,width=64", "gst", "videotestsrc ! video/x-raw,width=64"),
        ("gst:filesrc location=file:///x%20y", "gst", "filesrc location=file:///x%20y"),
        ("csi://0", "csi", ""),
    ],
)
def test_what_a_text_names(text: str, scheme: str, path: str) -> None:
    uri = parse_source_uri(text)
    assert (uri.scheme, uri.path) == (scheme, path)
    assert is_live(text) == (scheme != "file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rstp://cam/x", "unknown kind of source 'rstp'; did you mean 'rtsp'"),
        ("rtsp:///x", "rtsp:///x: has no host; write rtsp://HOST/path"),
        ("rtsp://cam/x?transport=quic", "transport is 'quic'; write tcp or udp"),
        ("rtsp://cam:port/x", "malformed"),
        ("rtsp://eve:%FF@cam/x", "malformed"),
        ("csi://front", "csi://front: name a sensor by its number: csi://0"),
        ("csi://0?mod=1", "unknown option 'mod'; did you mean 'mode'"),
        ("v4l2://dev/video2", "write v4l2:///dev/video2, or /dev/video2"),
        ("v4l2://1", "write v4l2:///dev/video1, or /dev/video1"),
        ("v4l2:///dev/video0?format=mjpg", "unknown format 'mjpg'; did you mean 'mjpeg'"),
        ("v4l2:///dev/video0?width=640", "width and height go together"),
        ("v4l2:///dev/video0?fps=0", "fps is 0; a live camera has a rate of its own"),
        ("gst:", "has no pipeline; write it as gst-launch-1.0"),
        ("gst://videotestsrc", "has no pipeline"),
    ],
)
def test_a_wrong_camera_uri_is_refused_before_it_is_opened(text: str, message: str) -> None:
    for refuse in (is_live, open_source):
        with pytest.raises(SourceUriError) as caught:
            refuse(text)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    "contents",
    [f"eve:{AWKWARD}", f"eve:{AWKWARD}\n", f"eve\n{AWKWARD}\n", f"\ufeffeve\r\n{AWKWARD}\r\n"],
)
def test_credentials_from_a_file(tmp_path: Path, contents: str) -> None:
    path = tmp_path / "camera"
    path.write_bytes(contents.encode())
    assert read_credentials(path) == Credentials("eve", AWKWARD)
    path.write_bytes(b"eve:")
    assert read_credentials(path) == Credentials("eve", "")


@pytest.mark.parametrize(
    "contents", [b"", b"q8Zr", b":q8Zr", b"a\nb\nq8Zr", b"\nq8Zr", b"\xffq8Zr"]
)
def test_a_file_without_credentials_is_named_but_not_quoted(
    tmp_path: Path, contents: bytes
) -> None:
    path = tmp_path / "camera"
    path.write_bytes(contents)
    with pytest.raises(SettingsError, match=str(path)) as caught:
        read_credentials(path)
    assert "q8Zr" not in str(caught.value)


def test_a_password_from_a_file_may_have_what_only_python_takes_for_line_ends(
    tmp_path: Path,
) -> None:
    path = tmp_path / "camera"
    path.write_bytes("eve:q8\x0cZ\x85r\u2028\n".encode())
    assert read_credentials(path) == Credentials("eve", "q8\x0cZ\x85r\u2028")


def test_a_path_with_a_nul_has_no_credentials() -> None:
    with pytest.raises(SettingsError, match="cannot be read: embedded null byte"):
        read_credentials("a\0b")


@pytest.mark.parametrize(
    "text", ["http://cam/\udcff", "rtsp://eve:\udcff@cam/x", "gst:a \udcff", "v4l2:///dev/\udcff"]
)
def test_a_uri_that_is_not_utf_8_is_refused(text: str) -> None:
    with pytest.raises(SourceUriError, match="is not UTF-8; percent-encode"):
        is_live(text)


def test_an_absent_credentials_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"camera: cannot be read: No such file"):
        read_credentials(tmp_path / "camera")
