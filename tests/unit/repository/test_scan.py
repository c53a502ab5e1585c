"""What is on disk is read as Triton reads it; what is no model is left alone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from edge_server.errors import ModelConfigError
from edge_server.model_config.files import ModelFiles
from edge_server.repository.scan import Repositories

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_models_and_their_versions_are_found_in_order(tmp_path: Path) -> None:
    for directory in ("b/10", "b/9", "b/notes", "a/1", "a/.tmp", ".git/1"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "README.md").touch()
    models = Repositories([tmp_path]).all()
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
        assert list(Repositories([tmp_path]).all()["m"].versions) == [1]
    assert "'01' which contains leading zeros" in caplog.text
    assert "'one' which fails to convert to integral number" in caplog.text
    assert "warmup" not in caplog.text


def test_a_model_in_two_repositories_is_refused_and_the_others_are_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for directory in ("one/m/1", "two/m/1", "two/other/1"):
        (tmp_path / directory).mkdir(parents=True)
    models = Repositories([tmp_path / "one", tmp_path / "two"]).all()
    assert str(models["m"]) == (
        f"model appears in two or more repositories: {tmp_path}/one/m, {tmp_path}/two/m; rename "
        "or remove all but one"
    )
    assert isinstance(models["other"], ModelFiles)
    assert "model m: not unique across all model repositories" in caplog.text


def test_a_repository_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"absent: the model repository cannot be read"):
        Repositories([tmp_path / "absent"]).all()


def test_what_tools_leave_behind_is_no_model_and_nothing_to_warn_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("lost+found", "__pycache__", "_old", ".git", "m"):
        (tmp_path / name).mkdir()
    assert Repositories([tmp_path]).all().keys() == {"m"}
    assert caplog.text == ""


@pytest.mark.parametrize("name", ["my model", "bad\nname", "über", "-m", "m" * 65])
def test_a_name_that_no_model_can_have_is_left_out_with_a_warning_of_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    for directory in (name, "m"):
        (tmp_path / directory / "1").mkdir(parents=True)
    assert Repositories([tmp_path]).all().keys() == {"m"}
    (record,) = caplog.records
    assert f"directory {name!r} is left out: a model name has" in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize("odd", ["odd", "odd/1"])
def test_a_model_that_cannot_be_read_says_so_and_the_others_are_found(
    tmp_path: Path, unreadable: Callable[[Path], None], odd: str
) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    unreadable(tmp_path / odd)
    models = Repositories([tmp_path]).all()
    assert isinstance(models["m"], ModelFiles)
    assert str(models["odd"]) == (
        f"{tmp_path / odd}: cannot be read: File name too long; the user that the daemon runs as "
        "must be able to read it"
    )


def test_one_model_is_found_by_its_name_and_by_no_other(tmp_path: Path) -> None:
    for directory in ("one/m/1", "one/m/3", "two/m2/1", ".git/1"):
        (tmp_path / directory).mkdir(parents=True)
    paths = [tmp_path / "one", tmp_path / "two"]
    found = Repositories(paths).find("m")
    assert isinstance(found, ModelFiles)
    assert list(found.versions) == [1, 3]
    for name in ("no", "..", "../.git", ".git", "", "m\0"):
        assert Repositories(paths).find(name) is None


def test_names_are_counted_over_all_repositories_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for directory in ("one/m/01", "one/my model", "two/m", "two/n"):
        (tmp_path / directory).mkdir(parents=True)
    assert Repositories([tmp_path / "one", tmp_path / "two"]).names() == {"m": 2, "n": 1}
    assert caplog.text == ""
