"""A repository is looked at without being led out of it, kept waiting or flooded."""

from __future__ import annotations

import errno
import gc
import os
from typing import TYPE_CHECKING

import pytest

from edge_server.repository import scan
from edge_server.repository.change_detector import read_repositories
from edge_server.repository.scan import SeenFile, opened, scan_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    place = tmp_path / "repository"
    write(place / "m" / "config.pbtxt", "x")
    write(place / "m" / "1" / "model.onnx", "abc")
    return place


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_later(path: Path, text: str) -> None:
    """Write when the file system's clock has gone on since `path` was changed last."""
    changed = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == changed:
        path.write_text(text)


def fault(repository: Path, name: str = "m") -> str:
    return read_repositories([repository]).models[name].fault


def test_every_file_is_seen_with_size_times_and_inode(repository: Path) -> None:
    (repository / "m" / "2").mkdir()
    found = read_repositories([repository]).models["m"]
    status = (repository / "m" / "1" / "model.onnx").stat()
    assert found.files == (
        SeenFile("1/model.onnx", 3, status.st_mtime_ns, status.st_ino, status.st_ctime_ns),
        *(f for f in found.files if f.path == "config.pbtxt"),
    )
    assert found.directories == ("1", "2")
    assert found.directory == repository / "m"
    assert not found.fault
    assert scan_model(repository, "m") == found


@pytest.mark.parametrize(
    "name", [".git/x", ".m.swp", "m~", "model.onnx.part", "a.tmp", "__pycache__/a.pyc", "1/.x"]
)
def test_what_editors_and_copies_leave_behind_does_not_count(repository: Path, name: str) -> None:
    before = read_repositories([repository])
    write(repository / "m" / name, "x")
    assert read_repositories([repository]) == before


@pytest.mark.parametrize("name", [".incoming-m", "_old", "m.tmp", "lost+found"])
def test_unfinished_and_hidden_directories_are_no_models(repository: Path, name: str) -> None:
    write(repository / name / "1" / "model.onnx")
    write(repository / "README.md")
    assert list(read_repositories([repository]).models) == ["m"]


def test_links_out_are_not_followed(repository: Path, tmp_path: Path) -> None:
    write(tmp_path / "secret", "s")
    (repository / "m" / "1" / "labels.txt").symlink_to(tmp_path / "secret")
    assert "1/labels.txt is a symbolic link" in fault(repository)


def test_links_that_are_to_be_followed_count_as_what_they_lead_to(
    repository: Path, tmp_path: Path
) -> None:
    write(tmp_path / "shared" / "2" / "model.onnx", "abcd")
    (repository / "m" / "1" / "weights").symlink_to(tmp_path / "shared" / "2" / "model.onnx")
    (repository / "m" / "1" / "back").symlink_to("..")
    (repository / "m" / "2").symlink_to(tmp_path / "shared" / "2")
    (repository / "n").symlink_to("m")
    for name in "mn":
        seen = scan_model(repository, name, follow_links=True)
        assert not seen.fault
        assert {file.path: file.size for file in seen.files} == {
            "1/model.onnx": 3,
            "1/weights": 4,
            "2/model.onnx": 4,
            "config.pbtxt": 1,
        }
        assert seen.directories == ("1", "2")
        with opened(seen, "2/model.onnx") as file:
            assert os.read(file, 9) == b"abcd"
    (tmp_path / "shared" / "2" / "model.onnx").unlink()
    fault = scan_model(repository, "m", follow_links=True).fault
    assert "1/weights is a symbolic link that leads nowhere; remove it" in fault


def test_a_model_that_is_itself_a_link_is_not_followed(repository: Path, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "1" / "model.onnx")
    (repository / "n").symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in fault(repository, "n")
    assert not fault(repository)


def test_a_pipe_does_not_block_the_scan(repository: Path) -> None:
    os.mkfifo(repository / "m" / "1" / "pipe")
    assert "1/pipe is no regular file" in fault(repository)


def test_what_is_too_much_is_a_fault(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "MOST_FILES", 2)
    assert "more than 2 files" in fault(repository)
    monkeypatch.undo()
    with (repository / "m" / "1" / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert "GiB" in fault(repository)
    (repository / "m" / "1" / "sparse").unlink()
    write(repository / "m" / "/".join("d" * 20) / "x")
    assert "deeper" in fault(repository)


def test_a_name_that_cannot_be_one_is_a_fault(repository: Path) -> None:
    write(repository / "bad name" / "1" / "model.onnx")
    assert "is no model" in fault(repository, "bad name")


def test_a_directory_whose_name_is_no_text_is_a_fault_that_any_text_can_carry(
    repository: Path,
) -> None:
    write(repository / "\udcffa\nb" / "1" / "model.onnx")
    seen = read_repositories([repository]).models[r"\xffa\nb"]
    assert seen.name == r"\xffa\nb"
    assert r"'\xffa\nb' is no model" in seen.fault


@pytest.mark.parametrize("path", ["1/\udcff", "\udcff/x", "1/\udcff/x"])
def test_a_file_whose_name_is_no_text_is_a_fault_that_any_text_can_carry(
    repository: Path, path: str
) -> None:
    write(repository / "m" / path)
    seen = scan_model(repository, "m")
    assert r"\xff: the name is not UTF-8; rename it" in seen.fault
    assert seen.fault.encode()
    assert not seen.files


def test_the_same_name_in_two_repositories_is_a_fault(repository: Path, tmp_path: Path) -> None:
    write(tmp_path / "second" / "m" / "1" / "model.onnx")
    found = read_repositories([repository, tmp_path / "second"])
    assert "appears in two or more" in found.models["m"].fault
    assert not found.unreadable


def test_a_repository_that_is_gone_or_empty_counts_as_unreadable(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    found = read_repositories([tmp_path / "gone", tmp_path / "empty"])
    assert not found.models
    assert found.unreadable == {
        tmp_path / "gone": "cannot be read: No such file or directory",
        tmp_path / "empty": "holds no model",
    }


def test_a_file_is_opened_below_its_model_only(repository: Path, tmp_path: Path) -> None:
    seen = scan_model(repository, "m")
    with opened(seen, "1/model.onnx") as file:
        assert os.read(file, 9) == b"abc"
    # Between the look and the opening a directory becomes a link that leads out.
    write(tmp_path / "out" / "model.onnx", "secret")
    (repository / "m" / "1" / "model.onnx").unlink()
    (repository / "m" / "1").rmdir()
    (repository / "m" / "1").symlink_to(tmp_path / "out")
    with pytest.raises(NotADirectoryError), opened(seen, "1/model.onnx"):
        pass
    with pytest.raises(OSError, match="leads out"), opened(seen, "../m/config.pbtxt"):
        pass


def test_a_file_that_became_a_link_is_not_opened(repository: Path, tmp_path: Path) -> None:
    seen = scan_model(repository, "m")
    write(tmp_path / "secret", "secret")
    (repository / "m" / "config.pbtxt").unlink()
    (repository / "m" / "config.pbtxt").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic link") as caught, opened(seen, "config.pbtxt"):
        pass
    assert caught.value.errno == errno.ELOOP


def test_a_file_that_became_a_pipe_is_refused(repository: Path) -> None:
    seen = scan_model(repository, "m")
    (repository / "m" / "config.pbtxt").unlink()
    os.mkfifo(repository / "m" / "config.pbtxt")
    with pytest.raises(OSError, match="no regular file"), opened(seen, "config.pbtxt"):
        pass


def test_nothing_stays_open(repository: Path) -> None:
    (repository / "m" / "1" / "link").symlink_to("/")
    gc.collect()  # a test before this one may have left some
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - descriptors, not paths
    for _ in range(3):
        read_repositories([repository])
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - as above
