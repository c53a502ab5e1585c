"""What is loaded of a repository that is not followed is a copy, whole, and nobody else's."""

from __future__ import annotations

import errno
import gc
import os
import resource
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import pytest

from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.model_config.files import ModelFiles
from edge_server.repository.content import PrivateCopies, PrivateDirectory, copy_model
from edge_server.repository.scan import Repositories

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from edge_server.repository.content import Content
    from edge_server.repository.scan import ModelTree


@pytest.fixture
def private() -> Iterator[PrivateDirectory]:
    directory = PrivateDirectory()
    yield directory
    directory.close()


@pytest.fixture
def copies(private: PrivateDirectory) -> PrivateCopies:
    return PrivateCopies(private)


@pytest.fixture
def model(repository: Path) -> Path:
    directory = repository / "m"
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text("x")
    (directory / "1" / "weights").write_text("abc")
    return directory


def exchange(file: Path, text: str) -> None:
    """Other content, with the size, the time and the inode of the former."""
    old = file.stat()
    while file.stat().st_ctime_ns == old.st_ctime_ns:
        file.write_text(text)
        os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))


def test_a_copy_stays_as_it_is_and_is_called_by_the_name_that_people_know(
    copies: PrivateCopies, model: Path
) -> None:
    files = copies.copy(model)
    (model / "1" / "weights").write_text("")
    assert files.versions.keys() == {1}
    assert files.directory != model
    assert (files.versions[1] / "weights").read_text() == "abc"
    assert files.as_shown(f"{files.config_path}: wrong") == f"{model}/config.pbtxt: wrong"
    assert files.shown_config_path == model / "config.pbtxt"


def test_a_copy_behind_a_link_is_called_by_that_name_too(
    copies: PrivateCopies, model: Path, tmp_path: Path
) -> None:
    """ONNX Runtime follows links before it names a file."""
    files = copies.copy(model)
    link = tmp_path / "copies"
    link.symlink_to(files.directory.parent)
    linked = replace(files, directory=link / files.directory.name)
    for directory in (linked.directory, files.directory):
        assert linked.as_shown(f"{directory}/1/weights: wrong") == f"{model}/1/weights: wrong"


def test_what_has_not_changed_is_not_copied_again(copies: PrivateCopies, model: Path) -> None:
    first, again = copies.copy(model), copies.copy(model)
    assert first == again
    exchange(model / "1" / "weights", "xyz")
    changed = copies.copy(model)
    assert (changed.versions[1] / "weights").read_text() == "xyz"
    assert changed.fingerprint != first.fingerprint
    exchange(model / "1" / "weights", "abc")
    same = copies.copy(model)
    assert same.fingerprint == first.fingerprint
    assert same.directory != first.directory


def test_it_goes_with_its_last_reference(copies: PrivateCopies, model: Path) -> None:
    files: ModelFiles | None = copies.copy(model)
    assert files is not None
    place = files.directory.parent
    assert place.exists()
    files = None
    gc.collect()
    assert not place.exists()


def test_links_are_followed(copies: PrivateCopies, model: Path, tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("far away")
    (model / "1" / "linked").symlink_to(tmp_path / "blob")
    (model.parent / "n").symlink_to("m")
    found = Repositories([model.parent], copies.copy).all()
    assert list(found) == ["m", "n"]
    for files in found.values():
        assert isinstance(files, ModelFiles)
        linked = files.versions[1] / "linked"
        assert linked.read_text() == "far away"
        assert not linked.is_symlink()


def test_what_does_not_fit_its_manifest_is_refused(copies: PrivateCopies, model: Path) -> None:
    (model / "manifest.json").write_text('{"model": "m", "files": {}}')
    with pytest.raises(ModelConfigError, match=r"is not in it; push the model again"):
        copies.copy(model)
    found = Repositories([model.parent], copies.copy).find("m")
    assert isinstance(found, ModelConfigError)


def test_a_model_that_is_written_to_meanwhile_is_tried_again_and_then_refused(
    copies: PrivateCopies,
    private: PrivateDirectory,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writes = 0

    def meddle_and_copy(tree: ModelTree, place: Path) -> Content:
        nonlocal writes
        if writes:
            writes -= 1
            exchange(model / "1" / "weights", f"ab{writes}")
        return copy_model(tree, place)

    monkeypatch.setattr("edge_server.repository.content.copy_model", meddle_and_copy)
    writes = 3
    with pytest.raises(ModelConfigError, match="changed while it was copied"):
        copies.copy(model)
    assert not list(private.path().iterdir())
    writes = 2
    files = copies.copy(model)
    assert (files.versions[1] / "weights").read_text() == "ab0"


def test_a_disk_that_is_full_is_an_error_with_the_remedy(
    copies: PrivateCopies, private: PrivateDirectory, model: Path
) -> None:
    (model / "1" / "weights").write_bytes(b"x" * 100_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(ModelConfigError, match=r"cannot be copied: .*TMPDIR"):
            copies.copy(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(private.path().iterdir())


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, ModelLoadError), (errno.EIO, ModelLoadError), (errno.EACCES, ModelConfigError)],
)
def test_a_copy_that_fails_for_a_reason_that_may_pass_may_be_tried_again(
    copies: PrivateCopies, monkeypatch: pytest.MonkeyPatch, model: Path, code: int, kind: type
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("edge_server.repository.content.copy_model", fail)
    with pytest.raises(ModelConfigError, match="cannot be copied: ") as caught:
        copies.copy(model)
    assert type(caught.value) is kind


def test_a_directory_too_deep_for_a_model_is_refused(copies: PrivateCopies, model: Path) -> None:
    (model / "/".join("d" * 900)).mkdir(parents=True)
    with pytest.raises(ModelConfigError, match="directories deeper than 16; flatten them"):
        copies.copy(model)
