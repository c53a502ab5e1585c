"""What the kernel tells of a repository is a hint to look, and names what was renamed into it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edge_server.repository.inotify_watch import InotifyWatch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_S = 30.0


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    place = tmp_path / "repository"
    place.mkdir()
    return place


@pytest.fixture
def arrivals(repository: Path, tmp_path: Path) -> Iterator[InotifyWatch]:
    made = InotifyWatch([tmp_path / "not there", repository])
    assert made.wait(0.0) is None
    yield made
    made.close()


def test_a_directory_renamed_into_place_has_arrived(
    arrivals: InotifyWatch, repository: Path, tmp_path: Path
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m").rename(repository / "m")
    assert arrivals.wait(PATIENCE_S) == {"m"}
    assert arrivals.wait(0.0) is None


def test_what_is_made_there_or_no_model_has_not_arrived(
    arrivals: InotifyWatch, repository: Path, tmp_path: Path
) -> None:
    (repository / "n").mkdir()
    assert arrivals.wait(PATIENCE_S) == set()
    (tmp_path / "file").touch()
    (tmp_path / "file").rename(repository / "file")
    assert arrivals.wait(PATIENCE_S) == set()
    (repository / "n").rename(repository / ".hidden")
    assert arrivals.wait(PATIENCE_S) == set()


def test_a_repository_that_comes_back_is_watched_again(
    arrivals: InotifyWatch, repository: Path, tmp_path: Path
) -> None:
    repository.rmdir()
    while arrivals.wait(0.0) is not None:
        pass
    repository.mkdir()
    arrivals.wait(0.0)
    (tmp_path / "m").mkdir()
    (tmp_path / "m").rename(repository / "m")
    assert arrivals.wait(PATIENCE_S) == {"m"}


def test_with_nothing_to_watch_it_only_waits(tmp_path: Path) -> None:
    arrivals = InotifyWatch([tmp_path / "not there"])
    assert arrivals.wait(0.001) is None
    arrivals.close()
