"""A copy is what the repository held at one moment, however others write, or there is none."""

from __future__ import annotations

import io
import os
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from edge_server.errors import ModelConfigError
from edge_server.repository.content import (
    TornModel,
    content_of,
    copy_model,
    read_file,
    remove,
    seal,
)
from edge_server.repository.scan import scan_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from edge_server.repository.scan import ModelTree

SECRET = b"nobody shall read this"


@pytest.fixture
def model(repository: Path) -> Path:
    directory = repository / "m"
    (directory / "1").mkdir(parents=True)
    (directory / "2").mkdir()
    (directory / "config.pbtxt").write_bytes(b"0" * 100)
    (directory / "1/model.onnx").write_bytes(b"0" * 1_000_000)
    return directory


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    directory = tmp_path / "outside"
    directory.mkdir()
    (directory / "model.onnx").write_bytes(SECRET)
    return directory


def of(model: Path) -> ModelTree:
    return scan_model(model.parent, model.name)


def grow(model: Path) -> None:
    with (model / "1/model.onnx").open("ab") as file:
        file.write(b"0")


def shrink(model: Path) -> None:
    os.truncate(model / "1/model.onnx", 999_999)


def rewrite(model: Path) -> None:
    (model / "config.pbtxt").write_bytes(b"1" * 100)


def set_back(model: Path) -> None:
    rewrite(model)
    os.utime(model / "config.pbtxt", (1, 1))


def replace(model: Path) -> None:
    """By one that looks the same, time of change included."""
    new = model / ".new"
    new.write_bytes(b"1" * 100)
    status = (model / "config.pbtxt").stat()
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    new.replace(model / "config.pbtxt")


def take_away(model: Path) -> None:
    (model / "config.pbtxt").unlink()


def add(model: Path) -> None:
    (model / "2/model.onnx").touch()


def add_version(model: Path) -> None:
    (model / "3").mkdir()


def remove_version(model: Path) -> None:
    (model / "2").rmdir()


def link_file(model: Path) -> None:
    take_away(model)
    (model / "config.pbtxt").symlink_to("1/model.onnx")


def link_directory(model: Path) -> None:
    (model / "1").rename(model / "2/1")
    (model / "1").symlink_to("2/1")


def make_pipe(model: Path) -> None:
    take_away(model)
    os.mkfifo(model / "config.pbtxt")


def rename(model: Path) -> None:
    model.rename(model.with_name("other"))


def lose_repository(model: Path) -> None:
    model.parent.rename(model.parent.with_name("elsewhere"))


@pytest.mark.parametrize(
    "change",
    [
        grow, shrink, rewrite, set_back, replace, take_away, add, add_version, remove_version,
        link_file, link_directory, make_pipe, rename, lose_repository,
    ],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_what_is_not_what_was_seen_is_torn(
    model: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    tree = of(model)
    change(model)
    with pytest.raises(TornModel, match="changed while it was copied; push it in one go"):
        copy_model(tree, tmp_path / "copy")


class Meddler(io.BytesIO):
    """A copy during which the source changes, once."""

    def __init__(self, meddle: Callable[[], object]) -> None:
        super().__init__()
        self._meddle: Callable[[], object] | None = meddle

    def write(self, piece: object) -> int:
        meddle, self._meddle = self._meddle, None
        if meddle is not None:
            meddle()
        return super().write(piece)


def test_a_change_that_hides_itself_is_torn(model: Path) -> None:
    tree = of(model)
    file = model / "1/model.onnx"

    def meddle() -> None:
        status = file.stat()
        with file.open("r+b") as opened:
            opened.write(b"1")
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    with pytest.raises(TornModel, match=r"/m/1/model.onnx: changed while"):
        read_file(tree, tree.files[0], Meddler(meddle))
    assert [f[:4] for f in of(model).files] == [f[:4] for f in tree.files], "or this shows nothing"


def test_a_change_right_after_another_is_torn(model: Path) -> None:
    """Kernels before 6.13 give both the same time, where they fall into one tick."""
    file = model / "1/model.onnx"
    for letter in b"abcdefghij":
        file.write_bytes(bytes([letter]) * 1_000_000)
        tree = of(model)
        with pytest.raises(TornModel):
            read_file(tree, tree.files[0], Meddler(partial(file.write_bytes, b"0" * 1_000_000)))


def test_a_file_that_grows_fills_no_disk(model: Path) -> None:
    tree = of(model)
    copy = Meddler(lambda: grow(model))
    with pytest.raises(TornModel):
        read_file(tree, tree.files[0], copy)
    assert len(copy.getvalue()) <= 1_000_000


def test_what_cannot_be_read_is_an_error(model: Path) -> None:
    tree = of(model)
    with pytest.raises(ModelConfigError, match="cannot be read: File name too long; the user that"):
        read_file(tree, tree.files[0]._replace(path="x" * 300))


def test_the_copy_of_a_model_is_equal_to_it(model: Path, tmp_path: Path) -> None:
    content = copy_model(of(model), tmp_path / "m")
    seal(tmp_path / "m")
    assert content_of(scan_model(tmp_path, "m")) == content == content_of(of(model))
    assert content.empty == ("2",)
    remove(tmp_path / "m")
    assert not (tmp_path / "m").exists()
    remove(tmp_path / "m")


@pytest.fixture
def meanwhile() -> Iterator[Callable[[Callable[[int], None]], None]]:
    """Does something again and again, on another thread, till the test is over."""
    stop = threading.Event()
    threads = []

    def meanwhile(what: Callable[[int], None]) -> None:
        def run() -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                what(turn)

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield meanwhile
    stop.set()
    for thread in threads:
        thread.join()


def test_a_copy_is_of_one_moment_while_the_model_is_rewritten_all_the_time(
    model: Path, tmp_path: Path, meanwhile: Callable[[Callable[[int], None]], None]
) -> None:
    def write(turn: int) -> None:
        # In place, in pieces, one file after the other; the sizes stay as they were.
        for name, size in (("config.pbtxt", 100), ("1/model.onnx", 1_000_000)):
            with (model / name).open("r+b", buffering=0) as file:
                for begin in range(0, size, 65536):
                    file.write(bytes([turn % 100]) * min(65536, size - begin))

    write(0)
    meanwhile(write)
    torn = 0
    for turn in range(20):
        copy = tmp_path / str(turn)
        try:
            copy_model(of(model), copy)
        except TornModel:
            torn += 1
        else:
            (now,) = set((copy / "config.pbtxt").read_bytes())
            data = (copy / "1/model.onnx").read_bytes()
            # So far as the writer had come, and from there on what it had written before.
            assert set(data.lstrip(bytes([now]))) <= {(now - 1) % 100}
    assert torn, "or nothing was written meanwhile"


@pytest.mark.parametrize("path", ["1", "1/model.onnx"])
def test_a_link_that_comes_and_goes_leads_nowhere(
    model: Path,
    outside: Path,
    tmp_path: Path,
    meanwhile: Callable[[Callable[[int], None]], None],
    path: str,
) -> None:
    place = model / path
    target = outside if path == "1" else outside / "model.onnx"

    def swap(turn: int) -> None:
        place.rename(model / ".aside")
        place.symlink_to(target)
        place.unlink()
        (model / ".aside").rename(place)

    (model / "1/model.onnx").write_bytes(b"0" * len(SECRET))
    meanwhile(swap)
    copied = 0
    for turn in range(300):
        copy = tmp_path / str(turn)
        try:
            copy_model(of(model), copy)
            copied += 1
        except ModelConfigError:
            continue
        finally:
            for file in copy.rglob("*"):
                assert file.is_dir() or file.read_bytes() != SECRET
                assert not file.is_symlink()
    assert copied, "or nothing was ever there"
