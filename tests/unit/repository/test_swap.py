"""Names in a repository are put right after a crash, and nobody's work is taken for a leftover."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edge_server.errors import ModelConfigError
from edge_server.repository.transfer import Incoming, roll_back, swap, tidy

if TYPE_CHECKING:
    from pathlib import Path


def make(repository: Path, *names: str) -> None:
    """Directories, each with a file that has its first name."""
    for name in names:
        (repository / name).mkdir()
        (repository / name / "was").write_text(name)


def was(repository: Path) -> dict[str, str]:
    return {path.name: (path / "was").read_text() for path in repository.iterdir()}


def test_a_swap_exchanges_two_names(repository: Path) -> None:
    make(repository, "a", "b")
    swap(repository / "a", repository / "b")
    assert was(repository) == {"a": "b", "b": "a"}


@pytest.mark.parametrize(
    ("left", "becomes"),
    [
        # Before anything was exchanged.
        ([".incoming-m-1", "m"], {"m": "m"}),
        # Exchanged without the file system's help: after the first rename …
        ([".incoming-m-1", ".outgoing-1-m"], {"m": ".outgoing-1-m"}),
        # … and after the second one, with and without one before.
        ([".outgoing-1-m", "m"], {"m": "m", ".previous-m": ".outgoing-1-m"}),
        ([".outgoing-1-m", ".previous-m", "m"], {"m": "m", ".previous-m": ".previous-m"}),
        (
            [".incoming-m-1", ".outgoing-1-.previous-m", "m"],
            {"m": "m", ".previous-m": ".outgoing-1-.previous-m"},
        ),
    ],
)
def test_what_a_crash_left_is_removed_or_given_its_name_back(
    repository: Path, left: list[str], becomes: dict[str, str]
) -> None:
    make(repository, *left)
    tidy(repository)
    assert was(repository) == becomes


def test_what_another_push_is_filling_is_left_alone(repository: Path) -> None:
    make(repository, ".incoming-m-1")
    first, second = Incoming(repository, "m"), Incoming(repository, "m")
    assert len(list(repository.iterdir())) == 2
    first.close()
    assert len(list(repository.iterdir())) == 1
    second.close()
    assert list(repository.iterdir()) == []


def test_a_rollback_tidies_too(repository: Path) -> None:
    make(repository, ".incoming-m-1", ".previous-m", "m")
    roll_back(repository, "m")
    assert was(repository) == {"m": ".previous-m", ".previous-m": "m"}


@pytest.mark.parametrize("name", ["", ".", "..", "../m", "a/b", ".m", "a\0b", "m" * 65])
def test_what_can_be_no_model_s_name_is_refused(repository: Path, name: str) -> None:
    with pytest.raises(ModelConfigError, match="is no model: a model name has"):
        Incoming(repository, name)
    assert list(repository.iterdir()) == []
