"""config.pbtxt is read with errors that name file, line, field and remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edge_server.errors import ModelConfigError
from edge_server.model_config.parse import MAX_CONFIG_BYTES, read_model_config

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    return tmp_path / "m" / "config.pbtxt"


def test_unknown_field_names_file_line_and_the_nearest_field(path: Path) -> None:
    path.write_text('name: "x"\nmax_batchsize: 3\n')
    with pytest.raises(ModelConfigError) as caught:
        read_model_config(path)
    text = str(caught.value)
    assert text.startswith(f"{path}:2:1: ")
    assert '"max_batchsize"' in text
    assert 'Did you mean "max_batch_size"?' in text


def test_unknown_enum_value_names_the_nearest_value(path: Path) -> None:
    path.write_text('input { name: "a" data_type: TYPE_FP33 }')
    with pytest.raises(ModelConfigError, match=r'Did you mean "TYPE_FP32"\?'):
        read_model_config(path)


def test_absent_file_is_an_empty_configuration(path: Path) -> None:
    assert not read_model_config(path).ListFields()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"name: 'x" + b" " * MAX_CONFIG_BYTES, "at most"),
        (b"{", "config.pbtxt:1:1"),
    ],
)
def test_files_that_are_no_configuration_are_refused_in_words(
    path: Path, raw: bytes, says: str
) -> None:
    path.write_bytes(raw)
    with pytest.raises(ModelConfigError, match=says):
        read_model_config(path)


STEP = 'name: "e" ensemble_scheduling { step { model_name: "m" %s } }'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            STEP % 'input_map { key: "a" value: "x" } input_map { key: "a" value: "y" }',
            "input 'a' in model 'm' is mapped to multiple ensemble tensors for ensemble 'e' step 0",
        ),
        (
            STEP % 'output_map [ { key: "b" value: "x" }, { key: "b" value: "x" } ]',
            "output 'b' in model 'm' is mapped to multiple ensemble tensors",
        ),
        (
            'parameters { key: "scale" value { string_value: "1" } } '
            'parameters { key: "scale" value { string_value: "2" } }',
            "parameter 'scale' is given more than once for m",
        ),
    ],
)
def test_a_key_given_twice_is_refused_where_a_map_would_keep_the_last(
    path: Path, text: str, says: str
) -> None:
    path.write_text(text)
    with pytest.raises(ModelConfigError) as caught:
        read_model_config(path)
    assert str(caught.value).startswith(f"{path}: {says}")


def test_maps_are_read_as_the_published_message_has_them(path: Path) -> None:
    path.write_text(
        STEP % 'input_map { key: "a" value: "x" } input_map { key: "b" value: "x" }'
        + 'parameters { key: "scale" value { string_value: "1" } }'
    )
    message = read_model_config(path)
    assert dict(message.ensemble_scheduling.step[0].input_map) == {"a": "x", "b": "x"}
    assert message.parameters["scale"].string_value == "1"
