"""A stream is a model only when it came to its end, and never more than a model."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

import pytest

from edge_server.cli.model_push import pack
from edge_server.errors import EdgeServerError, ModelConfigError
from edge_server.repository.manifest import Manifest
from edge_server.repository.transfer import Entry, read_archive, receive, write_archive

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.deliveries import MakeModel


def archive_of(model: Path) -> bytes:
    buffer = io.BytesIO()
    write_archive(buffer, pack(model).entries())
    return buffer.getvalue()


def take(data: bytes, repository: Path, name: str = "") -> None:
    receive(repository, read_archive(io.BytesIO(data)), name)


def test_cut_off_anywhere_it_is_not_taken(repository: Path, make_model: MakeModel) -> None:
    data = archive_of(make_model())
    # A block is 512 bytes: cut within, and between, every one of them; two empty ones end it.
    for length in [at + more for at in range(0, len(data) - 512, 512) for more in (0, 1, 511)]:
        with pytest.raises(ModelConfigError, match="ended early"):
            take(data[:length], repository)
        assert list(repository.iterdir()) == []
    take(data, repository)
    assert [path.name for path in repository.iterdir()] == ["m"]


def test_what_was_changed_on_the_way_is_not_taken(repository: Path, make_model: MakeModel) -> None:
    data = bytearray(archive_of(make_model(**{"1/weights": "w" * 100})))
    data[data.index(b"w" * 100)] ^= 1
    with pytest.raises(
        ModelConfigError, match=r"1/weights has other content than manifest\.json says"
    ):
        take(bytes(data), repository)
    assert list(repository.iterdir()) == []


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
        take(buffer.getvalue(), repository, "m")
    assert list(repository.iterdir()) == []


def test_a_file_that_comes_twice_is_refused(repository: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("x"), io.BytesIO())
    with pytest.raises(EdgeServerError, match="x: cannot be written: File exists"):
        take(buffer.getvalue(), repository, "m")


def test_more_than_a_model_may_have_is_refused_before_it_is_written(
    repository: Path, tmp_path: Path
) -> None:
    entry = tarfile.TarInfo("x")
    entry.size = 1 << 40
    with pytest.raises(ModelConfigError, match="more than 10000 files or 16 GiB"):
        take(entry.tobuf(tarfile.GNU_FORMAT), repository, "m")


@pytest.mark.parametrize(
    "kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.GNUTYPE_SPARSE]
)
def test_a_header_of_any_length_takes_no_memory(repository: Path, kind: bytes) -> None:
    entry = tarfile.TarInfo("x")
    entry.type, entry.size = kind, 1 << 40
    with pytest.raises(ModelConfigError, match="'x' is neither a file nor a directory"):
        take(entry.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20), repository, "m")
    assert list(repository.iterdir()) == []


@pytest.mark.parametrize("data", [bytes(1024), b"x" * 1024, Entry.__doc__.encode() * 9])
def test_what_is_no_archive_of_a_model_is_refused(repository: Path, data: bytes) -> None:
    with pytest.raises(ModelConfigError, match=r"does not begin with manifest.json|ended early"):
        take(data, repository)
    assert list(repository.iterdir()) == []


@pytest.mark.parametrize("name", ["../m", "a/b", ".m", "", "x" * 10_000, "\x1b[2J"])
def test_a_manifest_of_no_model_s_name_is_refused(repository: Path, name: str) -> None:
    manifest = Manifest(name, {}).encode()
    with pytest.raises(ModelConfigError, match="is no model: a model name has") as refused:
        receive(repository, iter([Entry.of("manifest.json", manifest)]))
    assert len(str(refused.value)) < 500
    assert str(refused.value).isprintable()
    assert list(repository.iterdir()) == []


def test_what_lacks_a_file_of_its_manifest_is_not_placed(
    repository: Path, make_model: MakeModel
) -> None:
    manifest = next(pack(make_model()).entries())
    with pytest.raises(ModelConfigError, match="1/weights is missing"):
        receive(repository, iter([manifest]))
    assert list(repository.iterdir()) == []


def test_a_path_longer_than_a_header_arrives(repository: Path, make_model: MakeModel) -> None:
    path = "1/" + "d" * 200 + "/" + "f" * 200
    take(archive_of(make_model(**{path: "x"})), repository)
    assert (repository / "m" / path).read_text() == "x"
