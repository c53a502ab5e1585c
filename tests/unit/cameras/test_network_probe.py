"""What is sent to a camera to find out why it cannot be opened."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.cameras.network import (
    addresses_of,
    authorization,
    fault_of_response,
    parse_response,
)
from edge_server.cameras.source_uri import Credentials, parse_source_uri
from edge_server.errors import SourceError

EVE = Credentials("Mufasa", "Circle Of Life")


def test_digest_as_in_rfc_2617_without_qop() -> None:
    # RFC 2617 3.5's example; RFC 2069's form of the response, which has no qop.
    challenge = (
        'Digest realm="testrealm@host.com", nonce="dcd98b7102dd2f0e8b11d0f600bfb0c093", '
        'opaque="5ccc069c403ebaf9f0171e9517f40e41"'
    )
    header = authorization([challenge], EVE, "GET", "/dir/index.html")
    first = hashlib.md5(b"Mufasa:testrealm@host.com:Circle Of Life").hexdigest()  # noqa: S324  # RFC 2617
    second = "39aff3a2bab6126f332b942af96d3366"  # of GET:/dir/index.html, as the RFC has it
    proof = hashlib.md5(f"{first}:dcd98b7102dd2f0e8b11d0f600bfb0c093:{second}".encode())  # noqa: S324  # RFC 2617
    assert f'response="{proof.hexdigest()}"' in header
    assert 'opaque="5ccc069c403ebaf9f0171e9517f40e41"' in header
    assert "Circle" not in header


def test_digest_is_preferred_to_basic_and_unknown_schemes_get_nothing() -> None:
    digest = 'Digest realm="a", nonce="b", algorithm=SHA-256'
    assert authorization(['Basic realm="a"', digest], EVE, "GET", "/").startswith("Digest")
    assert authorization(['basic realm="a"'], EVE, "GET", "/").startswith("Basic ")
    assert authorization(["Negotiate", 'Digest algorithm="SHA-512"'], EVE, "GET", "/") == ""


@given(st.binary(max_size=200))
def test_any_bytes_are_a_response_or_none(data: bytes) -> None:
    response = parse_response(data)
    assert response.protocol in {"", "RTSP", "HTTP"}


@pytest.mark.parametrize("status", ["200 OK", "401 No", "403 No", "404 No", "500 No", "nonsense"])
@given(st.text(st.characters(codec="latin-1", exclude_categories=("Cc",)), max_size=12))
def test_no_password_shows_whatever_a_camera_responds(status: str, text: str) -> None:
    password = f"q8Zr{text}"
    encoded = quote(password, safe="")
    uri = parse_source_uri(f"rtsp://eve:{encoded}@cam/x")
    echo = f"RTSP/1.0 {status} {password} rtsp://eve:{encoded}@cam/x\r\nContent-Type: {password}"
    body = f"\r\n\r\na=rtpmap:96 {password}/90000"
    error = fault_of_response(
        uri, uri.credentials, parse_response(f"{echo}{body}".encode("latin-1"))
    )
    assert error.reason in {"unavailable", "unauthorized", "not_found", "no_decoder"}
    assert password not in str(error)
    assert encoded not in str(error)


def test_a_long_challenge_without_fields_takes_no_time() -> None:
    begun = time.process_time()
    assert not authorization(["Digest " + "a" * 65536], EVE, "DESCRIBE", "rtsp://cam/x")[1000:]
    assert time.process_time() - begun < 0.5


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 500 " + b"x" * 60000,
        b"HTTP/1.1 500 \x1b[2J\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: " + b"x" * 60000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: \x1b[2J\r\n\r\n",
    ],
)
def test_an_error_quotes_little_of_what_a_camera_sends(data: bytes) -> None:
    error = fault_of_response(parse_source_uri("http://cam/x"), None, parse_response(data))
    assert len(str(error)) < 400
    assert str(error).isprintable()


def test_an_error_quotes_a_few_of_endless_codecs() -> None:
    body = b"a=rtpmap:96 opus/48000\r\n" * 2500
    response = parse_response(b"RTSP/1.0 200 OK\r\n\r\n" + body)
    error = fault_of_response(parse_source_uri("rtsp://cam/x"), None, response)
    assert "offers opus, opus" in str(error)
    assert len(str(error)) < 400


@pytest.mark.parametrize(
    ("data", "protocol", "status"),
    [
        (b"RTSP/1.0 401 Unauthorized\r\nWWW-Authenticate: Basic realm=x\r\n\r\n", "RTSP", 401),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", "HTTP", 200),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "", 0),
        (b"", "", 0),
    ],
)
def test_the_status_of_a_response(data: bytes, protocol: str, status: int) -> None:
    response = parse_response(data)
    assert (response.protocol, response.status) == (protocol, status)


def test_headers_are_found_whatever_their_case() -> None:
    response = parse_response(
        b"RTSP/1.0 401 X\r\nwww-authenticate: a\r\nWWW-Authenticate: b\r\n\r\n"
    )
    assert response.headers("WWW-Authenticate") == ["a", "b"]


def test_a_name_service_that_does_not_respond_does_not_hold_the_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait())
    with pytest.raises(SourceError, match="the name service does not respond to 'cam'") as caught:
        addresses_of(parse_source_uri("rtsp://cam/x"), timeout_s=0.001)
    over.set()
    assert caught.value.reason == "unavailable"
