"""What the kernel tells of a repository is a hint to look, and names what was renamed into it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edge_server.repository.change_detector import InotifyWatch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TIMEOUT_S = 30.0


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    place = tmp_path / "repository"
    place.mkdir()
    return place


@pytest.fixture
def inotify_watch(repository: Path, tmp_path: Path) -> Iterator[InotifyWatch]:
    made = InotifyWatch([tmp_path / "not there", repository])
    assert made.wait(0.0) is None
    yield made
    made.close()


def test_a_directory_renamed_into_place_has_arrived(
    inotify_watch: InotifyWatch, repository: Path, tmp_path: Path
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m").rename(repository / "m")
    assert inotify_watch.wait(TIMEOUT_S) == {"m"}
    assert inotify_watch.wait(0.0) is None


def test_what_is_made_there_or_no_model_has_not_arrived(
    inotify_watch: InotifyWatch, repository: Path, tmp_path: Path
) -> None:
    (repository / "n").mkdir()
    assert inotify_watch.wait(TIMEOUT_S) == set()
    (tmp_path / "file").touch()
    (tmp_path / "file").rename(repository / "file")
    assert inotify_watch.wait(TIMEOUT_S) == set()
    (repository / "n").rename(repository / ".hidden")
    assert inotify_watch.wait(TIMEOUT_S) == set()


def test_a_repository_that_comes_back_is_watched_again(
    inotify_watch: InotifyWatch, repository: Path, tmp_path: Path
) -> None:
    repository.rmdir()
    while inotify_watch.wait(0.0) is not None:
        pass
    repository.mkdir()
    inotify_watch.wait(0.0)
    (tmp_path / "m").mkdir()
    (tmp_path / "m").rename(repository / "m")
    assert inotify_watch.wait(TIMEOUT_S) == {"m"}


def test_with_nothing_to_watch_it_only_waits(tmp_path: Path) -> None:
    inotify_watch = InotifyWatch([tmp_path / "not there"])
    assert inotify_watch.wait(0.001) is None
    inotify_watch.close()
