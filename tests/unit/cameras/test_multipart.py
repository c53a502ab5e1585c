"""A multipart stream is cut into its parts, however its bytes come, in bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.cameras.http_mjpeg import MultipartError, MultipartParser
from edge_server.cameras.jpeg import LONGEST_JPEG_BYTES


def stream(bodies: list[bytes], *, length: bool, prefix: bytes = b"--") -> bytes:
    data = b""
    for body in bodies:
        head = prefix + b"cam\r\nContent-Type: image/jpeg\r\n"
        head += b"Content-Length: %d\r\n" % len(body) if length else b""
        data += head + b"\r\n" + body + b"\r\n"
    return data + prefix + b"cam\r\n"


@given(
    bodies=st.lists(st.binary(max_size=40).filter(lambda b: b"--" not in b), min_size=1),
    length=st.booleans(),
    boundary=st.sampled_from([b"cam", b"--cam", b'"cam"']),
    step=st.integers(1, 30),
)
def test_parts_come_out_whatever_pieces_they_come_in(
    bodies: list[bytes], length: bool, boundary: bytes, step: int
) -> None:
    data = stream(bodies, length=length)
    parser, parts = MultipartParser(boundary), []
    for at in range(0, len(data), step):
        parser.feed(data[at : at + step])
        while (part := parser.pop()) is not None:
            parts.append(part)
    ends = b"" if length else b"\r\n"
    assert parts == [body + ends for body in bodies]


def test_a_length_is_believed_where_the_body_has_the_boundary() -> None:
    parser = MultipartParser(b"cam")
    parser.feed(stream([b"a--camb"], length=True))
    assert parser.pop() == b"a--camb"


def test_an_image_that_never_ends_is_refused() -> None:
    parser = MultipartParser(b"cam")
    parser.feed(b"--cam\r\n\r\n")
    for _ in range(LONGEST_JPEG_BYTES // 2**20):
        parser.feed(bytes(2**20))
        assert parser.pop() is None
    parser.feed(bytes(2**20))
    with pytest.raises(MultipartError, match="more than 32 MiB"):
        parser.pop()


def test_an_announced_image_of_gigabytes_is_refused_at_once() -> None:
    parser = MultipartParser(b"cam")
    parser.feed(b"--cam\r\nContent-Length: 3000000000\r\n\r\n")
    with pytest.raises(MultipartError, match="more than 32 MiB"):
        parser.pop()


def test_a_head_that_never_ends_is_refused() -> None:
    parser = MultipartParser(b"cam")
    parser.feed(b"--cam\r\n" + b"X: y\r\n" * 2000)
    with pytest.raises(MultipartError, match="head of an image never ends"):
        parser.pop()


def test_what_has_no_parts_is_not_kept() -> None:
    parser = MultipartParser(b"cam")
    for _ in range(100):
        parser.feed(bytes(2**16))
        assert parser.pop() is None
    parser.feed(stream([b"x"], length=True))
    assert parser.pop() == b"x"
    with pytest.raises(MultipartError, match="boundary is empty"):
        MultipartParser(b"--")


def test_bytes_that_never_become_an_image_are_refused() -> None:
    parser = MultipartParser(b"cam")
    for _ in range(2):  # an image ends the count
        for _ in range(31):
            parser.feed(bytes(2**20))
            assert parser.pop() is None
        parser.feed(b"--cam\r\nContent-Length: 1\r\n\r\nx\r\n")
        assert parser.pop() == b"x"
    parser.feed(bytes(33 * 2**20))
    with pytest.raises(MultipartError, match="no image begins within 32 MiB"):
        parser.pop()
