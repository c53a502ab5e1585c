"""What is on disk is read as Triton reads it; what is no model is left alone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from edge_server.errors import ModelConfigError
from edge_server.repository.scan import scan_repositories

if TYPE_CHECKING:
    from pathlib import Path


def test_models_and_their_versions_are_found_in_order(tmp_path: Path) -> None:
    for directory in ("b/10", "b/9", "b/notes", "a/1", "a/.tmp", ".git/1"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "README.md").touch()
    models = scan_repositories([tmp_path])
    assert {name: list(files.versions) for name, files in models.items()} == {
        "a": [1],
        "b": [9, 10],
    }


def test_version_directories_that_do_not_count_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for directory in ("m/01", "m/one", "m/warmup", "m/1"):
        (tmp_path / directory).mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        assert list(scan_repositories([tmp_path])["m"].versions) == [1]
    assert "'01' which contains leading zeros" in caplog.text
    assert "'one' which fails to convert to integral number" in caplog.text
    assert "warmup" not in caplog.text


def test_a_model_in_two_repositories_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one/m/1").mkdir(parents=True)
    (tmp_path / "two/m/1").mkdir(parents=True)
    with pytest.raises(ModelConfigError, match="appears in two or more repositories"):
        scan_repositories([tmp_path / "one", tmp_path / "two"])


def test_a_repository_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"absent: the model repository cannot be read"):
        scan_repositories([tmp_path / "absent"])


def test_a_name_that_could_break_out_of_a_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad\nname").mkdir()
    with pytest.raises(ModelConfigError, match="a model name has"):
        scan_repositories([tmp_path])
