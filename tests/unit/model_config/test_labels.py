"""Label files are read at load, from the model's own directory and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError
from edge_server.model_config.files import MAX_LABEL_FILE_BYTES, ModelFiles, read_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    return tmp_path / "m"


def labels(directory: Path, filename: str) -> Mapping[str, tuple[str, ...]]:
    message = pb.ModelConfig(name="m")
    message.output.add(name="scores", label_filename=filename)
    message.output.add(name="unlabelled")
    return read_labels(message, ModelFiles("m", directory, {}))


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"lane\nroad\n", ("lane", "road")),
        (b"lane\r\n\r\nf\xc3\xbcr", ("lane", "", "f\u00fcr")),
        (b"\xef\xbb\xbflane\n", ("lane",)),
        (b"", ("",)),
    ],
)
def test_a_label_is_a_line_and_its_index_the_lines_number(
    directory: Path, raw: bytes, expected: tuple[str, ...]
) -> None:
    (directory / "labels.txt").write_bytes(raw)
    assert labels(directory, "labels.txt") == {"scores": expected}


@pytest.mark.parametrize(
    "name", ["/etc/hostname", "../other.txt", "a/../../other.txt", "link", "\0"]
)
def test_a_file_outside_the_model_directory_is_refused(directory: Path, name: str) -> None:
    (directory.parent / "other.txt").write_text("secret")
    (directory / "link").symlink_to("../other.txt")
    with pytest.raises(ModelConfigError) as caught:
        labels(directory, name)
    assert str(caught.value).endswith(
        f"label file path '{name}' for output 'scores' in model 'm' is outside model directory"
    )


def test_a_link_within_the_model_directory_is_followed(directory: Path) -> None:
    (directory / "real.txt").write_text("lane")
    (directory / "link").symlink_to("real.txt")
    assert labels(directory, "link") == {"scores": ("lane",)}


def test_a_circle_of_links_cannot_be_read(directory: Path) -> None:
    (directory / "link").symlink_to("link")
    with pytest.raises(ModelConfigError, match=r"link: (cannot be read|missing)"):
        labels(directory, "link")


def test_a_missing_file_is_named(directory: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"labels\.txt: missing; output 'scores' of model"):
        labels(directory, "labels.txt")


def test_a_file_that_cannot_be_read_is_an_error(
    directory: Path, unreadable: Callable[[Path], None]
) -> None:
    unreadable(directory / "labels.txt")
    with pytest.raises(ModelConfigError, match=r"labels\.txt: cannot be read"):
        labels(directory, "labels.txt")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [(b"lane\n\xff", "not UTF-8 text at byte 5"), (b" " * (MAX_LABEL_FILE_BYTES + 1), "at most")],
)
def test_what_is_no_text_or_too_large_is_refused(
    directory: Path, raw: bytes, expected: str
) -> None:
    (directory / "labels.txt").write_bytes(raw)
    with pytest.raises(ModelConfigError, match=expected):
        labels(directory, "labels.txt")
