"""A download goes on where it was cut, and gives what its digest says or nothing."""

from __future__ import annotations

import hashlib
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import ModelConfigError, SettingsError, Unavailable
from edge_server.repository.remote import open_origin
from edge_server.repository.remote_files import Body, ConnectionCut, RemoteFile, download

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DATA = bytes(range(256)) * 40


class FakeServer:
    """Serves `data` and cuts each connection after some bytes.

    Attributes:
        cuts: bytes until each cut, in turn; then nothing is cut.
        offsets: of each request.
        has_ranges: False begins anew each time.
    """

    def __init__(self, data: bytes, cuts: list[int], *, has_ranges: bool = True) -> None:
        self.data, self.cuts, self.has_ranges = data, cuts, has_ranges
        self.tag = "one"
        self.offsets: list[int] = []

    def open(self, offset: int, tag: str) -> Body:
        self.offsets.append(offset)
        begin = offset if self.has_ranges and tag == self.tag else 0
        return Body(begin, self.tag, len(self.data), self._pieces(begin))

    def _pieces(self, begin: int) -> Iterator[bytes]:
        end = begin + self.cuts.pop(0) if self.cuts else len(self.data)
        for at in range(begin, min(end, len(self.data)), 100):
            yield self.data[at : min(at + 100, end)]
        if end < len(self.data):
            raise ConnectionCut("cut")

    def file(self, digest: str = "", size: int | None = None) -> RemoteFile:
        digest = digest or hashlib.sha256(self.data).hexdigest()
        return RemoteFile("model.onnx", digest, size, self.open)


def fetch(server: FakeServer, target: Path, **how: object) -> int:
    """Download; return the number of bytes that came."""
    came: list[int] = []
    download(server.file(**how), target, came.append, sleep=lambda _: None)
    return sum(came)


@given(cuts=st.lists(st.integers(1, len(DATA) // 4), max_size=8))
def test_every_byte_comes_once_however_it_is_cut(
    cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = tmp_path_factory.mktemp("any") / "file"
    assert fetch(FakeServer(DATA, list(cuts)), target) == len(DATA)
    assert target.read_bytes() == DATA


def test_a_server_without_ranges_begins_anew(tmp_path: Path) -> None:
    assert fetch(FakeServer(DATA, [500, 700], has_ranges=False), tmp_path / "file") > len(DATA)
    assert (tmp_path / "file").read_bytes() == DATA


def test_other_content_under_the_same_name_begins_anew(tmp_path: Path) -> None:
    # Five attempts that bring nothing end it.
    server = FakeServer(DATA, [500, 0, 0, 0, 0, 0, 0])
    with pytest.raises(Unavailable, match="are kept"):
        fetch(server, tmp_path / "file")
    server.data, server.tag, server.cuts = DATA[::-1], "two", []
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == DATA[::-1]


def test_the_next_pull_goes_on(tmp_path: Path) -> None:
    server = FakeServer(DATA, [500, 0, 0, 0, 0, 0, 0])
    with pytest.raises(Unavailable, match="500 bytes are kept"):
        fetch(server, tmp_path / "file")
    assert not (tmp_path / "file").exists()
    server.cuts = []
    assert fetch(server, tmp_path / "file") == len(DATA) - 500
    assert fetch(server, tmp_path / "file") == 0


def test_another_digest_keeps_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="has sha256"):
        fetch(FakeServer(DATA, []), tmp_path / "file", digest="0" * 64)
    assert not [path for path in tmp_path.iterdir() if path.stat().st_size > 3]


def test_no_more_comes_than_the_manifest_says(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="more than 100"):
        fetch(FakeServer(DATA, []), tmp_path / "file", size=100)
    assert not (tmp_path / "file").exists()


def test_a_missing_library_comes_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(
        Unavailable, match=r"boto3 is not installed; pip install 'edge-server\[pull"
    ):
        open_origin("s3://fleet/net/", "")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("ftp://host/net.tar", "give it as s3://BUCKET/KEY"),
        ("https://user:secret@host/net.tar", "no password in a URL"),
        ("https://host/net", "neither an archive"),
        ("https://host/net.tar", "give --sha256"),
        ("s3://", "give it as s3://BUCKET/KEY"),
    ],
)
def test_a_url_that_cannot_be_pulled_is_named(url: str, expected: str) -> None:
    with pytest.raises(SettingsError, match=expected) as caught:
        open_origin(url, "")
    assert "secret" not in str(caught.value)
