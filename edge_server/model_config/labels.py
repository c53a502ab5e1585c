"""Label files: the class names of an output, one per line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edge_server.errors import ModelConfigError
from edge_server.model_config.files import outside, reading

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.model_config.files import ModelFiles

# The largest published label sets have some twenty thousand lines of a few words.
MAX_LABEL_FILE_BYTES = 16 * 1024 * 1024


def read_labels(message: Any, files: ModelFiles) -> Mapping[str, tuple[str, ...]]:
    """Read output → labels by index, for each output with a `label_filename`.

    Raises:
        ModelConfigError: a file is outside the model's directory, missing, unreadable, too large
            or not UTF-8 text.
    """
    return {
        output.name: _read(output, message.name, files)
        for output in message.output
        if output.label_filename
    }


def _read(output: Any, model: str, files: ModelFiles) -> tuple[str, ...]:
    name = output.label_filename
    if outside(files.directory, name):
        raise ModelConfigError(
            f"{files.config_path}: label file path '{name}' for output '{output.name}' in model "
            f"'{model}' is outside model directory"
        )
    path = files.directory / name
    with reading(path):
        if not path.is_file():
            raise ModelConfigError(
                f"{path}: missing; output '{output.name}' of model '{model}' has its labels there"
            )
        with path.open("rb") as file:
            raw = file.read(MAX_LABEL_FILE_BYTES + 1)
    if len(raw) > MAX_LABEL_FILE_BYTES:
        raise ModelConfigError(
            f"{path}: a label file has at most {MAX_LABEL_FILE_BYTES} bytes; this one is larger"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelConfigError(
            f"{path}: not UTF-8 text at byte {error.start}; a label file has a label a line"
        ) from error
    return tuple(line.removesuffix("\r") for line in text.removesuffix("\n").split("\n"))
