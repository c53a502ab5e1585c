"""An archive that nobody vouches for gives the files of one model, or nothing."""

from __future__ import annotations

import io
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest

from edge_server.errors import ModelConfigError
from edge_server.repository.remote import archive_entries

if TYPE_CHECKING:
    from pathlib import Path


def tar(path: Path, files: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def special(path: Path, kind: bytes, name: str = "net/1/model.onnx", link: str = "") -> Path:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("net/config.pbtxt"))
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, link
        archive.addfile(info)
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {
        entry.path: b"".join(entry.pieces())
        for entry in archive_entries(path)
        if entry.read is not None
    }


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
@pytest.mark.parametrize("root", ["", "./", "net/", "a/b/net/"])
def test_the_model_is_what_lies_beside_its_configuration(
    mode: str, root: str, tmp_path: Path
) -> None:
    files = {"config.pbtxt": b"text", "1/model.onnx": b"weights"}
    path = tar(tmp_path / "any", {root + name: data for name, data in files.items()}, mode)
    assert contents(path) == files


def test_versions_show_where_a_model_without_configuration_lies(tmp_path: Path) -> None:
    path = tar(tmp_path / "net.tar", {"net/1/model.onnx": b"weights"}, "w")
    assert contents(path) == {"1/model.onnx": b"weights"}


def test_the_manifest_comes_first(tmp_path: Path) -> None:
    path = tar(tmp_path / "net.tgz", {"net/config.pbtxt": b"", "net/manifest.json": b"{}"})
    assert next(archive_entries(path)).path == "manifest.json"


def test_a_zip_is_read_too_and_damage_is_found(tmp_path: Path) -> None:
    path = tmp_path / "net.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("net/config.pbtxt", "text")
        archive.writestr("net/1/model.onnx", "weights")
    assert contents(path) == {"config.pbtxt": b"text", "1/model.onnx": b"weights"}
    path.write_bytes(path.read_bytes().replace(b"weights", b"WEIGHTS"))
    with pytest.raises(ModelConfigError, match="is damaged"):
        contents(path)


@pytest.mark.parametrize(
    "name", ["../out", "net/../../out", "/etc/passwd", "net/a\\..\\b", "other/1/model.onnx"]
)
def test_no_path_leaves_the_model(name: str, tmp_path: Path) -> None:
    path = tar(tmp_path / "net.tgz", {"net/config.pbtxt": b"", name: b"x"})
    with pytest.raises(ModelConfigError, match=r"leads out of the model|lies outside of"):
        contents(path)


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE]
)
def test_no_link_and_no_device_comes_out(kind: bytes, tmp_path: Path) -> None:
    path = special(tmp_path / "net.tar", kind, link="/etc/passwd")
    with pytest.raises(ModelConfigError, match="neither a file nor a directory"):
        contents(path)


def test_no_link_of_a_zip_comes_out(tmp_path: Path) -> None:
    path = tmp_path / "net.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.pbtxt", "")
        link = zipfile.ZipInfo("1/model.onnx")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(ModelConfigError, match="neither a file nor a directory"):
        contents(path)


class Zeros(io.RawIOBase):
    """So many zeros, which nobody has to keep."""

    def __init__(self, size: int) -> None:
        self._left = size

    def read(self, size: int = -1) -> bytes:
        size = min(size, self._left)
        self._left -= size
        return bytes(size)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path, size = tmp_path / "net.tar.gz", 70 << 20
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        archive.addfile(tarfile.TarInfo("net/config.pbtxt"))
        info = tarfile.TarInfo("net/1/model.onnx")
        info.size = size
        archive.addfile(info, Zeros(size))
    assert path.stat().st_size < size // 100
    entries = archive_entries(path)
    with pytest.raises(ModelConfigError, match="is it a model"):
        next(entries)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_that_is_a_bomb_is_not_read(kind: bytes, tmp_path: Path) -> None:
    info = tarfile.TarInfo("net/1/model.onnx")
    info.type, info.size = kind, 1 << 40
    path = tmp_path / "net.tar"
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(ModelConfigError, match=f"a header of it has {1 << 40} bytes"):
        contents(path)


@pytest.mark.parametrize(
    "headers",
    [
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"},
        {"GNU.sparse.map": "a,b", "GNU.sparse.size": "1"},
    ],
)
def test_a_broken_list_of_holes_is_damage(headers: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "net.tar"
    info = tarfile.TarInfo("net/1/model.onnx")
    info.pax_headers = headers
    path.write_bytes(info.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    with pytest.raises(ModelConfigError, match="is damaged"):
        contents(path)


@pytest.mark.parametrize("data", [b"", b"no archive", b"PK\x03\x04 cut", b"\x1f\x8b\x08cut off"])
def test_what_is_no_archive_is_named(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "net.tgz"
    path.write_bytes(data)
    with pytest.raises(ModelConfigError, match=r"net\.tgz: (is damaged|holds no model)"):
        contents(path)
