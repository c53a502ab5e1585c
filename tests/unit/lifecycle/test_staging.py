"""A client's files lie in a private place, never beside it, as long as somebody holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import InvalidRequest
from edge_server.lifecycle.model_spec import StagedFiles

if TYPE_CHECKING:
    from pathlib import Path


def test_files_lie_where_the_model_looks_for_them_till_nobody_holds_them(tmp_path: Path) -> None:
    staged = StagedFiles(tmp_path, "m", {"1/model.onnx": b"x", "./2//a/../b": b"y"})
    assert staged.directory.name == "m"
    assert (staged.directory / "1/model.onnx").read_bytes() == b"x"
    assert (staged.directory / "2/b").read_bytes() == b"y"
    held = [staged]
    del staged
    assert list(tmp_path.iterdir())
    held.clear()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "normalized"),
    [
        ("../x", "../x"),
        ("1/../../x", "../x"),
        ("/etc/passwd", "/etc/passwd"),
        ("", ""),
        ("1/..", ""),
        ("1/\0", "1/\0"),
    ],
)
def test_a_path_that_leaves_the_directory_is_refused(
    tmp_path: Path, key: str, normalized: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StagedFiles(tmp_path, "m", {"1/good": b"", key: b""})
    assert str(caught.value) == (
        f"Invalid file parameter 'file:{key}' with normalized path '{normalized}' must stay within "
        "model directory."
    )
    assert not list(tmp_path.iterdir())


def test_what_is_too_deep_or_too_much_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="2000 directories deep; at most 16 are possible"):
        StagedFiles(tmp_path, "m", {"/".join("d" * 2000): b""})
    with pytest.raises(InvalidRequest, match="10001 file parameters; a model has at most 10000"):
        StagedFiles(tmp_path, "m", {f"1/{number}": b"" for number in range(10_001)})
    with pytest.raises(InvalidRequest, match="is not UTF-8 text"):
        StagedFiles(tmp_path, "m", {"1/\ud800": b""})
    assert not list(tmp_path.iterdir())


@given(st.lists(st.sampled_from(["..", ".", "", "a", "b"]), max_size=8).map("/".join))
def test_nothing_is_ever_written_outside(
    tmp_path_factory: pytest.TempPathFactory, key: str
) -> None:
    root = tmp_path_factory.mktemp("root")
    (root / "staged").mkdir()
    try:
        staged = StagedFiles(root / "staged", "m", {key: b"x"})
    except InvalidRequest:
        assert not list((root / "staged").iterdir())
    else:
        (written,) = [path for path in root.rglob("*") if path.is_file()]
        (private,) = (root / "staged").iterdir()
        assert written.is_relative_to(private / "m")
        assert staged.directory == private / "m"


@pytest.mark.parametrize("keys", [("1", "1/a"), ("1/a", "1")])
def test_a_file_where_a_directory_must_be_is_reported(
    tmp_path: Path, keys: tuple[str, str]
) -> None:
    with pytest.raises(InvalidRequest, match="names a file where another one needs a directory"):
        StagedFiles(tmp_path, "m", dict.fromkeys(keys, b""))
    assert not list(tmp_path.iterdir())
