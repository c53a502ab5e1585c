"""A stream is a model only when it came to its end, and never more than a model."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

import pytest

from edge_server.errors import EdgeServerError, ModelConfigError
from edge_server.repository.transfer.incoming import Incoming
from edge_server.repository.transfer.inventory import FileContent
from edge_server.repository.transfer.local import LocalRepository, send_tree
from edge_server.repository.transfer.tar_stream import TarSink, receive
from edge_server.repository.tree import look

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.repository.transfer.conftest import MakeModel


def stream_of(model: Path) -> bytes:
    buffer = io.BytesIO()
    sink = TarSink(buffer)
    sink.end(send_tree(look(model.parent, model.name), sink))
    return buffer.getvalue()


def take(data: bytes, repository: Path) -> None:
    with LocalRepository(repository).receiving("m") as incoming:
        incoming.place(receive(io.BytesIO(data), incoming))


def test_cut_off_anywhere_it_is_not_taken(repository: Path, make_model: MakeModel) -> None:
    data = stream_of(make_model())
    end = data.index(b".contents.json") + 512
    # A block is 512 bytes: cut within, and between, every one of them.
    for length in [at + more for at in range(0, end, 512) for more in (0, 1, 511)]:
        with pytest.raises(ModelConfigError, match="ended early"):
            take(data[:length], repository)
        assert list(repository.iterdir()) == []
    take(data, repository)
    assert [path.name for path in repository.iterdir()] == ["m"]


def test_what_was_changed_on_the_way_is_not_taken(repository: Path, make_model: MakeModel) -> None:
    data = bytearray(stream_of(make_model(**{"1/weights": "w" * 100})))
    data[data.index(b"w" * 100)] ^= 1
    with pytest.raises(ModelConfigError, match="1/weights: arrived with other content"):
        take(bytes(data), repository)
    assert list(repository.iterdir()) == []


def test_abandoned_it_writes_no_more(make_model: MakeModel) -> None:
    buffer = io.BytesIO()
    sink = TarSink(buffer)
    sink.directory("1")
    written = len(buffer.getvalue())
    sink.abandon()
    assert len(buffer.getvalue()) == written


def climbing(tar: tarfile.TarInfo) -> None:
    tar.name = "../../x"


def absolute(tar: tarfile.TarInfo) -> None:
    tar.name = "/tmp/x"  # noqa: S108


def hidden(tar: tarfile.TarInfo) -> None:
    tar.name = "1/.x"


def link(tar: tarfile.TarInfo) -> None:
    tar.type, tar.linkname, tar.size = tarfile.SYMTYPE, "/etc", 0


def hard_link(tar: tarfile.TarInfo) -> None:
    tar.type, tar.linkname, tar.size = tarfile.LNKTYPE, "/etc/passwd", 0


def device(tar: tarfile.TarInfo) -> None:
    tar.type, tar.size = tarfile.CHRTYPE, 0


def deep(tar: tarfile.TarInfo) -> None:
    tar.name = "/".join("d" * 2000)


@pytest.mark.parametrize("turn", [climbing, absolute, hidden, link, hard_link, device, deep])
def test_what_no_model_may_hold_is_refused(
    repository: Path, turn: Callable[[tarfile.TarInfo], None]
) -> None:
    entry = tarfile.TarInfo("1/x")
    entry.size = 1
    turn(entry)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(entry, io.BytesIO(b"x"))
    with pytest.raises(
        ModelConfigError, match=r"may be no file of a model|is neither a file|16 directories"
    ):
        take(buffer.getvalue(), repository)
    assert list(repository.iterdir()) == []


def test_a_file_that_comes_twice_is_refused(repository: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("x"), io.BytesIO())
    with pytest.raises(EdgeServerError, match="x: cannot be written: File exists"):
        take(buffer.getvalue(), repository)


def test_more_than_a_model_may_have_is_refused_before_it_is_written(
    repository: Path, tmp_path: Path
) -> None:
    entry = tarfile.TarInfo("x")
    entry.size = 1 << 40
    with pytest.raises(ModelConfigError, match="more than 10000 files or 16 GiB"):
        take(entry.tobuf(tarfile.GNU_FORMAT), repository)


def test_only_what_is_expected_is_placed(repository: Path) -> None:
    incoming = Incoming(repository, "m")
    with pytest.raises(ModelConfigError, match="x: arrived with other content"):
        incoming.place({"x": FileContent("0" * 64, 0)})
    incoming.close()
